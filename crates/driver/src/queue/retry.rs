//! Command timeouts and retries: late commands, their second submission and their end.
//!
//! A command that completes in time costs nothing extra. Each slot has a tick counter: its first
//! value is stored together with the other fields of the submission, and the completion clears it.
//! [`RetryTable::tick_timeouts`] increments the counters of the slots in use. A command that
//! exceeds the limit becomes a [`LateCommand`], and its tick counter becomes 0, so the fast path
//! considers the slot free. The fast path therefore does not accept the completion of a late
//! command; [`RetryTable::pop`] handles it.

use super::core::Core;
use super::doorbell::Doorbell;
use crate::command::{Completion, Token};
use crate::dma::Buffer;
use shadowbell_spec::{Sqe, Status};
use std::cmp::Reverse;
use std::collections::VecDeque;

/// State of a late command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LateState {
    /// An Abort was sent for the command, or could not be sent because the limit of Abort commands
    /// was reached.
    Aborting,
    /// The command was submitted again.
    Resubmitted,
}

/// A command that exceeded its timeout. The fast path treats its slot as free.
#[derive(Clone, Copy, Debug)]
struct LateCommand {
    /// Command identifier in the submitter's [`Token`].
    token_cid: u16,
    /// Command identifier of the last submission: the controller completes the command with it.
    cid: u16,
    /// Number of submissions after the first one.
    repeats: u8,
    /// Number of ticks in this state.
    ticks: u8,
    state: LateState,
}

impl LateCommand {
    fn new(cid: u16, state: LateState) -> Self {
        Self { token_cid: cid, cid, repeats: 0, ticks: 0, state }
    }
}

/// Late commands of a queue, and commands that the driver has ended.
pub(crate) struct RetryTable {
    /// Late commands by slot. Empty until the first command is late.
    late: Vec<Option<LateCommand>>,
    late_count: usize,
    /// Completions of commands that the driver has ended. The slot of an ended command remains in
    /// use until the completion is taken, because the submitter still counts the command as
    /// outstanding.
    ended: VecDeque<Completion>,
    /// Maximum number of submissions of a command after the first one.
    max_repeats: u8,
}

/// Result of [`RetryTable::tick_timeouts`].
#[derive(Debug, Default)]
pub(crate) struct TimedOut {
    /// Identifiers of the commands that became late with this tick, as of their last submission.
    pub(crate) late: Vec<u16>,
    /// True if a command has been outstanding since before the last tick. Then CSTS must be read.
    pub(crate) is_long_running: bool,
    /// True if a late command exceeded the grace period. Its Abort is considered failed.
    pub(crate) overdue: bool,
}

/// Numbers of commands that [`RetryTable::restart`] submitted again, and of those that it ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Restarted {
    pub(crate) repeated: u64,
    pub(crate) ended: u64,
}

impl RetryTable {
    /// Creates a table for commands that are submitted again at most `max_repeats` times.
    pub(crate) fn new(max_repeats: u8) -> Self {
        Self { late: Vec::new(), late_count: 0, ended: VecDeque::new(), max_repeats }
    }

    fn late(&mut self, slot: u16) -> Option<&mut LateCommand> {
        self.late.get_mut(usize::from(slot))?.as_mut()
    }

    /// The late command in `slot`, if `cid` is the identifier of its last submission.
    fn find(&mut self, slot: u16, cid: u16) -> Option<LateCommand> {
        self.late(slot).filter(|late| late.cid == cid).copied()
    }

    fn insert(&mut self, slot: u16, slots: usize, command: LateCommand) {
        if self.late.is_empty() {
            self.late = vec![None; slots];
        }
        if let Some(entry) = self.late.get_mut(usize::from(slot)) {
            self.late_count += usize::from(entry.is_none());
            *entry = Some(command);
        }
    }

    fn remove(&mut self, slot: u16) {
        if let Some(entry) = self.late.get_mut(usize::from(slot)) {
            self.late_count -= usize::from(entry.is_some());
            *entry = None;
        }
    }

    /// Counts one tick for every outstanding command. A command that was outstanding for more than
    /// `limit` ticks becomes late; after `grace` further ticks it is overdue.
    pub(crate) fn tick_timeouts(&mut self, core: &mut Core, limit: u8, grace: u8) -> TimedOut {
        let mut timed_out = TimedOut::default();
        if core.outstanding() == 0 {
            return timed_out;
        }
        let count = core.slots.len();
        for slot in 0..count as u16 {
            let Some(entry) = core.slots.get_mut(usize::from(slot)) else { break };
            if entry.ticks != 0 {
                entry.ticks = entry.ticks.saturating_add(1);
                timed_out.is_long_running |= entry.ticks > 2;
                if entry.ticks > limit.saturating_add(1) {
                    let cid = entry.cid;
                    entry.ticks = 0;
                    self.insert(slot, count, LateCommand::new(cid, LateState::Aborting));
                    timed_out.late.push(cid);
                }
            } else if self.late_count != 0
                && let Some(late) = self.late(slot)
            {
                late.ticks = late.ticks.saturating_add(1);
                timed_out.is_long_running = true;
                match late.state {
                    LateState::Resubmitted if late.ticks > limit => {
                        (late.state, late.ticks) = (LateState::Aborting, 0);
                        timed_out.late.push(late.cid);
                    }
                    LateState::Aborting if late.ticks > grace => timed_out.overdue = true,
                    _ => {}
                }
            }
        }
        core.stats.late += timed_out.late.len() as u64;
        timed_out
    }

    /// Takes the next completion, of a late command or of any other. Skips entries without an
    /// outstanding command, at most as many as the queue has entries.
    pub(crate) fn pop(&mut self, core: &mut Core) -> Option<Completion> {
        for _ in 0..core.cq_size.entries() {
            let Some(word) = core.pop_word() else { break };
            if let Some(completion) = self.consume(core, word) {
                return Some(completion);
            }
        }
        core.stats.empty_polls += 1;
        None
    }

    /// Consumes the entry at the head, whose second word is `word`. Returns `None` if the entry
    /// completes no command.
    #[cold]
    fn consume(&mut self, core: &mut Core, word: u64) -> Option<Completion> {
        core.consume(word).or_else(|| {
            let first = core.advance();
            self.odd_completion(core, first, word)
        })
    }

    /// Handles a completion that matches no command of the fast path: it belongs to a late command,
    /// or to no command.
    #[cold]
    fn odd_completion(&mut self, core: &mut Core, first: u64, word: u64) -> Option<Completion> {
        let cid = (word >> 32) as u16;
        let slot = cid & core.slot_mask;
        let Some(late) = self.find(slot, cid) else {
            core.unknown_completion(cid);
            return None;
        };
        core.reported_sq_head = word as u16;
        let status = Status::from_bits((word >> 49) as u16);
        if self.should_resubmit(core, slot, late, status) {
            let late = LateCommand { repeats: late.repeats + 1, ..late };
            core.stats.repeated += 1;
            if self.resubmit(core, slot, late) {
                // A failure of the register write is ignored here: the next call that rings the
                // doorbell reports it.
                let _ = core.ring();
                return None;
            }
        }
        let buffer = self.retire(core, slot);
        core.free.push(slot);
        core.stats.completed += 1;
        let (dw0, dw1) = (first as u32, (first >> 32) as u32);
        Some(Completion { token: Token { cid: late.token_cid, slot }, status, dw0, dw1, buffer })
    }

    /// True if the command in `slot` was aborted because it was late, and may be submitted again.
    fn should_resubmit(&self, core: &Core, slot: u16, late: LateCommand, status: Status) -> bool {
        let aborted = late.state == LateState::Aborting && status.code() == Status::ABORT_REQUESTED;
        aborted && self.may_repeat(core, slot, late)
    }

    fn may_repeat(&self, core: &Core, slot: u16, late: LateCommand) -> bool {
        let command = core.slots.get(usize::from(slot)).map(|slot| slot.command);
        late.repeats < self.max_repeats && command.is_some_and(|c| c.is_repeatable())
    }

    /// Prepares the slot of a command to be freed. Returns the command's buffer.
    fn retire(&mut self, core: &mut Core, slot: u16) -> Option<Buffer> {
        self.remove(slot);
        let generation = core.generation;
        let entry = core.slots.get_mut(usize::from(slot))?;
        entry.ticks = 0;
        entry.cid = entry.cid.wrapping_add(generation);
        entry.buffer.take()
    }

    /// Writes the command in `slot` to the submission queue again, with a new identifier. A later
    /// completion with the old identifier is ignored.
    fn resubmit(&mut self, core: &mut Core, slot: u16, late: LateCommand) -> bool {
        let generation = core.generation;
        let Some(entry) = core.slots.get_mut(usize::from(slot)) else { return false };
        entry.ticks = 0;
        entry.cid = entry.cid.wrapping_add(generation);
        let cid = entry.cid;
        if !write_slot(core, slot) {
            return false;
        }
        let late = LateCommand { cid, ticks: 0, state: LateState::Resubmitted, ..late };
        self.insert(slot, core.slots.len(), late);
        true
    }

    /// Slots of outstanding commands, oldest first, each with the distance of its entry from the
    /// tail. If the entry was overwritten, the distance is the queue length.
    fn oldest_first(&self, core: &mut Core) -> Vec<(u32, u16)> {
        core.flush();
        let entries = core.sq_size.entries();
        let mut late = self.late.iter().map(Option::is_some);
        let mut distances: Vec<u32> = core
            .slots
            .iter()
            .map(|slot| {
                let outstanding = late.next().unwrap_or(false) || slot.ticks != 0;
                if outstanding { entries } else { 0 }
            })
            .collect();
        for back in 1..entries {
            let sqe: Sqe = core.sq.read(u32::from(core.sq_size.back(core.sq_tail, back)));
            let slot = usize::from(sqe.cid & core.slot_mask);
            let is_current = core.slots.get(slot).is_some_and(|slot| slot.cid == sqe.cid);
            match distances.get_mut(slot) {
                Some(distance) if is_current && *distance == entries => *distance = back,
                _ => {}
            }
        }
        let outstanding = distances.into_iter().zip(0u16..).filter(|(distance, _)| *distance != 0);
        let mut order: Vec<(u32, u16)> = outstanding.collect();
        order.sort_by_key(|(distance, _)| Reverse(*distance));
        order
    }

    /// Restarts the queue. The controller has deleted the queues or was reset before this call, so
    /// it no longer accesses the queues or the buffers of their commands. Zeroes the rings,
    /// replaces the doorbells, writes repeatable commands again in their old order, and ends the
    /// other commands. The caller creates the queues in the controller, and then
    /// [rings](Core::ring).
    pub(crate) fn restart(&mut self, core: &mut Core, doorbells: [Doorbell; 2]) -> Restarted {
        self.drain(core);
        let order = self.oldest_first(core);
        let unpublished = core.sq_size.distance(core.sq_published, core.sq_tail);
        core.reset_rings(doorbells);
        let mut restarted = Restarted::default();
        for (distance, slot) in order {
            let late = self.late(slot).copied();
            if distance <= unpublished {
                // The controller has not seen this entry, so this write does not count as a further
                // submission.
                let written = match late {
                    None => write_slot(core, slot),
                    Some(late) => self.resubmit(core, slot, late),
                };
                if !written {
                    self.end(core, slot, &mut restarted);
                }
                continue;
            }
            let cid = core.slots.get(usize::from(slot)).map_or(0, |slot| slot.cid);
            let late = late.unwrap_or(LateCommand::new(cid, LateState::Resubmitted));
            let again = LateCommand { repeats: late.repeats.saturating_add(1), ..late };
            if self.may_repeat(core, slot, late) && self.resubmit(core, slot, again) {
                restarted.repeated += 1;
            } else {
                self.end(core, slot, &mut restarted);
            }
        }
        core.stats.repeated += restarted.repeated;
        core.stats.ended += restarted.ended;
        restarted
    }

    /// Takes the available completions, and stores them for [`take_ended`](Self::take_ended). Two
    /// kinds of commands remain outstanding: commands that were aborted by the deletion of their
    /// queue, and late commands that were aborted and may be submitted again. The late commands are
    /// not submitted here: the new queue does not exist yet, so its doorbells must not be rung.
    fn drain(&mut self, core: &mut Core) {
        for _ in 0..core.cq_size.entries() {
            let Some(word) = core.pop_word() else { return };
            let (cid, status) = ((word >> 32) as u16, Status::from_bits((word >> 49) as u16));
            let slot = cid & core.slot_mask;
            let late = self.find(slot, cid);
            if status.code() == Status::ABORTED_SQ_DELETION
                || late.is_some_and(|late| self.should_resubmit(core, slot, late, status))
            {
                core.cq_head = core.cq_size.next(core.cq_head);
                core.phase ^= core.cq_head == 0;
            } else if let Some(completion) = self.consume(core, word) {
                // `consume` has freed the slot, but it must remain in use until the completion is
                // taken.
                core.free.pop();
                self.ended.push_back(completion);
            }
        }
    }

    /// Ends the command in `slot`. The controller must no longer execute the command.
    fn end(&mut self, core: &mut Core, slot: u16, restarted: &mut Restarted) {
        let token = self.token_of(core, slot);
        let buffer = self.retire(core, slot);
        self.end_with(core, token, buffer);
        restarted.ended += 1;
    }

    fn token_of(&mut self, core: &Core, slot: u16) -> Token {
        let cid = match self.late(slot) {
            Some(late) => late.token_cid,
            None => core.slots.get(usize::from(slot)).map_or(0, |slot| slot.cid),
        };
        Token { cid, slot }
    }

    fn end_with(&mut self, core: &mut Core, token: Token, buffer: Option<Buffer>) {
        self.ended.push_back(Completion::aborted_by_host(token, buffer));
        core.stats.completed += 1;
    }

    /// Fails the queue and ends every outstanding command. If `quiet` is true, the controller no
    /// longer accesses memory, and the completions return the buffers. Otherwise the caller gets
    /// the buffers, and must keep them allocated, because the controller may still write to them.
    pub(crate) fn end_all(&mut self, core: &mut Core, why: &str, quiet: bool) -> Vec<Buffer> {
        core.set_failed(|| why.into());
        let mut kept = Vec::new();
        // All outstanding commands have ended already, but the program has not taken their
        // completions.
        if core.outstanding() == self.ended.len() {
            return kept;
        }
        for (_, slot) in self.oldest_first(core) {
            let token = self.token_of(core, slot);
            let mut buffer = self.retire(core, slot);
            if !quiet {
                kept.extend(buffer.take());
            }
            self.end_with(core, token, buffer);
            core.stats.ended += 1;
        }
        kept
    }

    /// Takes the completion of a command that the driver has ended, and frees its slot.
    pub(crate) fn take_ended(&mut self, core: &mut Core) -> Option<Completion> {
        let completion = self.ended.pop_front()?;
        core.free.push(completion.token.slot);
        Some(completion)
    }

    /// True if completions of ended commands are available.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }
}

/// Writes the command in `slot` to the tail of the queue, with the identifier of the slot.
fn write_slot(core: &mut Core, slot: u16) -> bool {
    let Some(entry) = core.slots.get_mut(usize::from(slot)) else { return false };
    let (command, cid, buffer) = (entry.command, entry.cid, entry.buffer.take());
    let words = core.entry_of(slot, &command, buffer.as_ref());
    if let Some(entry) = core.slots.get_mut(usize::from(slot)) {
        entry.buffer = buffer;
    }
    // `entry_of` cannot fail, because the same command and buffer were accepted before.
    let Ok(words) = words else { return false };
    let sqe: Sqe = zerocopy::transmute!(words);
    core.push(zerocopy::transmute!(sqe.with_cid(cid)));
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Command;
    use crate::prp::PrpLists;
    use crate::queue::core::CoreConfig;
    use crate::queue::doorbell::Register;
    use shadowbell_doorbell::RingSize;
    use shadowbell_memory::{Mapping, Protection, Ring};
    use std::fs::File;

    const ENTRIES: u32 = 16;

    /// Creates a queue pair whose submission queue is mapped from `file`.
    fn core(file: &File) -> (Core, std::sync::Arc<Mapping>) {
        let page = || Mapping::anonymous(4096).unwrap().bytes();
        let sq = Mapping::from_fd(file, 0, 4096, Protection::ReadWrite).unwrap();
        let size = RingSize::new(ENTRIES).unwrap();
        let doorbell = || Doorbell::new(Register::Mapped(page().cell(0).unwrap()));
        let core = Core::new(CoreConfig {
            qid: 1,
            sq: Ring::over(&sq.bytes(), ENTRIES).unwrap(),
            sq_size: size,
            cq: Ring::over(&page(), ENTRIES).unwrap(),
            cq_size: size,
            sq_doorbell: doorbell(),
            cq_doorbell: doorbell(),
            lists: PrpLists::new(page(), 0, ENTRIES as usize - 1, 4096, 4096).unwrap(),
            max_transfer: 4096,
        });
        (core, sq)
    }

    /// Checks that no completion is taken by a scan of the whole queue. With one scan per
    /// completion, a long queue would take half a minute.
    #[test]
    fn a_queue_that_has_ended_is_not_scanned_again() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let (mut core, sq) = core(&file);
        let flush = Command::flush(1);
        for _ in 0..core.capacity() {
            core.submit(flush.words(), None, flush).unwrap();
        }
        core.ring().unwrap();
        let mut retries = RetryTable::new(0);
        assert!(retries.end_all(&mut core, "it is gone", true).is_empty());
        // A read of the submission queue now raises SIGBUS, and the handler marks the mapping of
        // the queue as poisoned.
        file.set_len(0).unwrap();
        for taken in 1..=core.capacity() {
            assert!(retries.end_all(&mut core, "it is gone", true).is_empty());
            let ended = retries.take_ended(&mut core).unwrap();
            assert_eq!(ended.status, Status::ABORTED_BY_HOST);
            assert_eq!(core.outstanding(), core.capacity() - taken);
        }
        assert!(retries.take_ended(&mut core).is_none());
        assert!(!sq.is_poisoned());
    }
}
