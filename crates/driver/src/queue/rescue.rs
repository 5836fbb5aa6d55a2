//! Commands that are late, and how they are submitted again or ended: everything of a queue's
//! [`Core`] that only happens when something went wrong.
//!
//! Nothing of it costs a command that completes in time anything. A slot has an age, which its
//! submission sets and its completion clears anyway; [`Core::grow_older`] lets those grow that are
//! still there. What has grown too old becomes a [`Case`], and its slot then looks free to the fast
//! path, so that its completion is found odd and ends up here.

use super::Completion;
use super::Token;
use super::bell::Bell;
use super::core::Core;
use crate::dma::Buffer;
use shadowbell_spec::{Cqe, Sqe, Status};
use std::collections::VecDeque;

/// What became of the command in a slot that was late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The controller was asked to abort it, or is not worth to be asked.
    Aborting,
    /// It was submitted again.
    Repeated,
}

/// A command that the fast path does not know any more.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// The identifier that its submitter knows it by.
    token: u16,
    /// The one that the controller knows it by.
    cid: u16,
    /// How often it was submitted again.
    repeats: u8,
    /// How often it was seen in this stage.
    age: u8,
    stage: Stage,
}

/// What a queue keeps of commands that were late.
#[derive(Default)]
pub(super) struct Rescue {
    /// By slot; empty until there was one.
    cases: Vec<Option<Case>>,
    count: usize,
    /// Commands that the driver has ended, for whoever asks for completions. Their slots are not free
    /// before: for whoever submitted them they are outstanding.
    ended: VecDeque<Completion>,
    /// How often a command is submitted again.
    repeats: u8,
}

impl Rescue {
    fn case(&mut self, slot: u16) -> Option<&mut Case> {
        self.cases.get_mut(usize::from(slot))?.as_mut()
    }

    fn open(&mut self, slot: u16, slots: usize, case: Case) {
        if self.cases.is_empty() {
            self.cases = vec![None; slots];
        }
        if let Some(place) = self.cases.get_mut(usize::from(slot)) {
            self.count += usize::from(place.is_none());
            *place = Some(case);
        }
    }

    fn close(&mut self, slot: u16) {
        if let Some(place) = self.cases.get_mut(usize::from(slot)) {
            self.count -= usize::from(place.is_some());
            *place = None;
        }
    }
}

/// What [`Core::grow_older`] found.
#[derive(Debug, Default)]
pub(crate) struct Ages {
    /// Commands that are late as of now, by the identifiers that the controller knows.
    pub(crate) late: Vec<u16>,
    /// A command was outstanding at the last look already: the controller is worth a look, too.
    pub(crate) lasting: bool,
    /// A command was late for so long that there is no hope for an abort.
    pub(crate) overdue: bool,
}

/// How many commands were submitted again, and how many ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rescued {
    pub(crate) repeated: u64,
    pub(crate) ended: u64,
}

impl Core {
    /// How often a command may be submitted again.
    pub(crate) fn set_repeats(&mut self, repeats: u8) {
        self.rescue.repeats = repeats;
    }

    /// Lets every outstanding command grow older by one. Those that are older than `limit` now are
    /// late, and overdue when they have been so for `grace`.
    pub(crate) fn grow_older(&mut self, limit: u8, grace: u8) -> Ages {
        let mut ages = Ages::default();
        if self.outstanding() == 0 {
            return ages;
        }
        let count = self.slots.len();
        for slot in 0..count as u16 {
            let Some(entry) = self.slots.get_mut(usize::from(slot)) else { break };
            if entry.age != 0 {
                entry.age = entry.age.saturating_add(1);
                ages.lasting |= entry.age > 2;
                if entry.age > limit.saturating_add(1) {
                    let cid = entry.cid;
                    entry.age = 0;
                    let stage = Stage::Aborting;
                    let case = Case { token: cid, cid, repeats: 0, age: 0, stage };
                    self.rescue.open(slot, count, case);
                    ages.late.push(cid);
                }
            } else if self.rescue.count != 0
                && let Some(case) = self.rescue.case(slot)
            {
                case.age = case.age.saturating_add(1);
                ages.lasting = true;
                match case.stage {
                    Stage::Repeated if case.age > limit => {
                        (case.stage, case.age) = (Stage::Aborting, 0);
                        ages.late.push(case.cid);
                    }
                    Stage::Aborting if case.age > grace => ages.overdue = true,
                    _ => {}
                }
            }
        }
        self.stats.late += ages.late.len() as u64;
        ages
    }

    /// A completion that the fast path can make nothing of: of a command that was late, or of none.
    #[cold]
    pub(super) fn odd_completion(&mut self, first: u64, word: u64) -> Option<Completion> {
        let cid = (word >> 32) as u16;
        let slot = cid & self.slot_mask;
        let Some(case) = self.rescue.case(slot).filter(|case| case.cid == cid).copied() else {
            self.unknown_completion(cid);
            return None;
        };
        self.sq_head_said = word as u16;
        let status = Status::from_bits((word >> 49) as u16);
        if self.is_to_be_repeated(slot, case, status) {
            let case = Case { repeats: case.repeats + 1, ..case };
            self.stats.repeated += 1;
            if self.write_again(slot, case) {
                // Who fails here says so to whoever comes next.
                let _ = self.ring();
                return None;
            }
        }
        let buffer = self.close_case(slot);
        self.free.push(slot);
        self.stats.completed += 1;
        let (dw0, dw1) = (first as u32, (first >> 32) as u32);
        Some(Completion { token: Token { cid: case.token, slot }, status, dw0, dw1, buffer })
    }

    /// Whether the command in `slot` was aborted because it was late, and is now to be submitted again.
    fn is_to_be_repeated(&self, slot: u16, case: Case, status: Status) -> bool {
        let aborted = case.stage == Stage::Aborting && status.code() == Status::ABORT_REQUESTED;
        aborted && self.may_repeat(slot, case)
    }

    fn may_repeat(&self, slot: u16, case: Case) -> bool {
        let command = self.slots.get(usize::from(slot)).map(|slot| slot.command);
        case.repeats < self.rescue.repeats && command.is_some_and(|c| c.is_repeatable())
    }

    /// Makes the slot of a case ready to be freed. Its buffer.
    fn close_case(&mut self, slot: u16) -> Option<Buffer> {
        self.rescue.close(slot);
        let generation = self.generation;
        let entry = self.slots.get_mut(usize::from(slot))?;
        entry.age = 0;
        entry.cid = entry.cid.wrapping_add(generation);
        entry.buffer.take()
    }

    /// Writes the command in `slot` into the submission queue once more, under another identifier:
    /// a completion of its earlier life is nobody's.
    fn write_again(&mut self, slot: u16, case: Case) -> bool {
        let generation = self.generation;
        let Some(entry) = self.slots.get_mut(usize::from(slot)) else { return false };
        entry.age = 0;
        entry.cid = entry.cid.wrapping_add(generation);
        let cid = entry.cid;
        if !self.write_slot(slot) {
            return false;
        }
        let case = Case { cid, age: 0, stage: Stage::Repeated, ..case };
        let slots = self.slots.len();
        self.rescue.open(slot, slots, case);
        true
    }

    /// Writes the command in `slot` at the tail, as its slot has it.
    fn write_slot(&mut self, slot: u16) -> bool {
        let Some(entry) = self.slots.get_mut(usize::from(slot)) else { return false };
        let (command, cid, buffer) = (entry.command, entry.cid, entry.buffer.take());
        let prps = if command.transfer == 0 {
            Some((0, 0))
        } else {
            self.prps(slot, buffer.as_ref(), command.offset, command.transfer).ok()
        };
        if let Some(entry) = self.slots.get_mut(usize::from(slot)) {
            entry.buffer = buffer;
        }
        // What went in once goes in again.
        let Some((prp1, prp2)) = prps else { return false };
        let sqe = command.sqe(cid).with_prps(prp1, prp2);
        self.put(zerocopy::transmute!(sqe));
        true
    }

    /// How far before the tail each slot's outstanding command is in the submission queue; 0 if there
    /// is none, and more than the queue has entries if it is not there any more.
    fn places(&mut self) -> Vec<u32> {
        self.deliver();
        let entries = self.sq_size.entries();
        let mut cases = self.rescue.cases.iter().map(Option::is_some);
        let mut places: Vec<u32> = self
            .slots
            .iter()
            .map(|slot| {
                let outstanding = cases.next().unwrap_or(false) || slot.age != 0;
                if outstanding { entries } else { 0 }
            })
            .collect();
        for back in 1..entries {
            let sqe: Sqe = self.sq.read(u32::from(self.sq_size.back(self.sq_tail, back)));
            let slot = usize::from(sqe.cid & self.slot_mask);
            let lives = self.slots.get(slot).is_some_and(|slot| slot.cid == sqe.cid);
            match places.get_mut(slot) {
                Some(place) if lives && *place == entries => *place = back,
                _ => {}
            }
        }
        places
    }

    /// Begins a new life: the controller has deleted the queues, or was reset, and is certain not to
    /// touch them or the buffers of their commands. They are made as new, with these doorbells, and
    /// commands that may be repeated are written again, in their old order; the others are ended.
    /// The caller creates the queues, and then [rings](Self::ring).
    pub(crate) fn restart(&mut self, bells: [Bell; 2]) -> Rescued {
        self.drain();
        let places = self.places();
        let untold = self.sq_size.distance(self.sq_published, self.sq_tail);
        let [sq_bell, cq_bell] = bells;
        self.stats.sq_doorbell_mmio_writes += self.sq_bell.trapped;
        self.stats.cq_doorbell_mmio_writes += self.cq_bell.trapped;
        self.stats.mmio_saved += self.sq_bell.saved() + self.cq_bell.saved();
        (self.sq_bell, self.cq_bell) = (sq_bell, cq_bell);
        (0..self.sq_size.entries()).for_each(|at| self.sq.write(at, &[0u8; Sqe::SIZE]));
        (0..self.cq_size.entries()).for_each(|at| self.cq.write(at, &[0u8; Cqe::SIZE]));
        (self.sq_tail, self.sq_published, self.sq_head, self.sq_head_said) = (0, 0, 0, 0);
        (self.cq_head, self.phase, self.cq_unpublished) = (0, true, 0);

        let mut order: Vec<(u32, u16)> =
            places.into_iter().zip(0u16..).filter(|(place, _)| *place != 0).collect();
        // The oldest first.
        order.sort_by_key(|(place, _)| std::cmp::Reverse(*place));
        let mut rescued = Rescued::default();
        for (place, slot) in order {
            let case = self.rescue.case(slot).copied();
            if place <= untold {
                // The controller never heard of it: this time does not count.
                let written = match case {
                    None => self.write_slot(slot),
                    Some(case) => self.write_again(slot, case),
                };
                if !written {
                    self.end(slot, &mut rescued);
                }
                continue;
            }
            let cid = self.slots.get(usize::from(slot)).map_or(0, |slot| slot.cid);
            let first = Case { token: cid, cid, repeats: 0, age: 0, stage: Stage::Repeated };
            let case = case.unwrap_or(first);
            let again = Case { repeats: case.repeats.saturating_add(1), ..case };
            if self.may_repeat(slot, case) && self.write_again(slot, again) {
                rescued.repeated += 1;
            } else {
                self.end(slot, &mut rescued);
            }
        }
        self.stats.repeated += rescued.repeated;
        self.stats.ended += rescued.ended;
        rescued
    }

    /// Takes the completions that are there, for whoever asks next. Commands that the deletion of
    /// their queue has ended are outstanding still, and so are those that were aborted to be submitted
    /// again: there is no queue for them before the new one, whose doorbells are not to be rung yet.
    fn drain(&mut self) {
        for _ in 0..self.cq_size.entries() {
            let word = self.cq.second_word(u32::from(self.cq_head));
            if (word >> 48 & 1 != 0) != self.phase {
                return;
            }
            let (cid, status) = ((word >> 32) as u16, Status::from_bits((word >> 49) as u16));
            let slot = cid & self.slot_mask;
            let case = self.rescue.case(slot).filter(|case| case.cid == cid).copied();
            if status.code() == Status::ABORTED_SQ_DELETION
                || case.is_some_and(|case| self.is_to_be_repeated(slot, case, status))
            {
                self.cq_head = self.cq_size.forward(self.cq_head, 1);
                self.phase ^= self.cq_head == 0;
            } else if let Some(completion) = self.consume_any(word) {
                // It has freed its slot.
                self.free.pop();
                self.rescue.ended.push_back(completion);
            }
        }
    }

    /// Ends the command in `slot`, with which the controller is certainly done.
    fn end(&mut self, slot: u16, rescued: &mut Rescued) {
        let token = self.token_of(slot);
        let buffer = self.close_case(slot);
        self.end_with(token, buffer);
        rescued.ended += 1;
    }

    fn token_of(&mut self, slot: u16) -> Token {
        let cid = match self.rescue.case(slot) {
            Some(case) => case.token,
            None => self.slots.get(usize::from(slot)).map_or(0, |slot| slot.cid),
        };
        Token { cid, slot }
    }

    fn end_with(&mut self, token: Token, buffer: Option<Buffer>) {
        let status = Status::ABORTED_BY_HOST;
        self.rescue.ended.push_back(Completion { token, status, dw0: 0, dw1: 0, buffer });
        self.stats.completed += 1;
    }

    /// Ends every outstanding command, and the queue. The buffers go back with their commands if the
    /// controller is `quiet`; otherwise it may write to them still, and they are returned to be kept.
    pub(crate) fn end_all(&mut self, why: &str, quiet: bool) -> Vec<Buffer> {
        self.set_failed(|| why.into());
        let mut kept = Vec::new();
        // The rest has ended, and was not asked for yet.
        if self.outstanding() == self.rescue.ended.len() {
            return kept;
        }
        let places = self.places();
        let mut order: Vec<(u32, u16)> =
            places.into_iter().zip(0u16..).filter(|(place, _)| *place != 0).collect();
        order.sort_by_key(|(place, _)| std::cmp::Reverse(*place));
        for (_, slot) in order {
            let token = self.token_of(slot);
            let mut buffer = self.close_case(slot);
            if !quiet {
                kept.extend(buffer.take());
            }
            self.end_with(token, buffer);
            self.stats.ended += 1;
        }
        kept
    }

    /// A command that the driver has ended.
    pub(crate) fn take_ended(&mut self) -> Option<Completion> {
        let completion = self.rescue.ended.pop_front()?;
        self.free.push(completion.token.slot);
        Some(completion)
    }

    /// Whether there is such a command.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        !self.rescue.ended.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::Command;
    use crate::prp::PrpLists;
    use crate::queue::bell::Register;
    use crate::queue::core::Parts;
    use shadowbell_doorbell::RingSize;
    use shadowbell_memory::{Mapping, Protection, Ring};
    use std::fs::File;

    const ENTRIES: u32 = 16;

    /// A queue whose submission queue lies in the file.
    fn core(file: &File) -> (Core, std::sync::Arc<Mapping>) {
        let page = || Mapping::anonymous(4096).unwrap().bytes();
        let sq = Mapping::from_fd(file, 0, 4096, Protection::ReadWrite).unwrap();
        let size = RingSize::new(ENTRIES).unwrap();
        let bell = || Bell::new(Register::Mapped(page().cell(0).unwrap()));
        let core = Core::new(Parts {
            qid: 1,
            sq: Ring::over(&sq.bytes(), ENTRIES).unwrap(),
            sq_size: size,
            cq: Ring::over(&page(), ENTRIES).unwrap(),
            cq_size: size,
            sq_bell: bell(),
            cq_bell: bell(),
            lists: PrpLists::new(page(), 0, ENTRIES as usize - 1, 4096, 4096).unwrap(),
            max_transfer: 4096,
        });
        (core, sq)
    }

    /// Whoever asks for completions comes by for each of them: a look through the whole queue each time
    /// takes half a minute for a long one.
    #[test]
    fn a_queue_that_has_ended_is_not_looked_through_again() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let (mut core, sq) = core(&file);
        let flush = Command::flush(1);
        for _ in 0..core.capacity() {
            core.submit(flush.words(), None, flush).unwrap();
        }
        core.ring().unwrap();
        assert!(core.end_all("it is gone", true).is_empty());
        // Whoever looks there now, loses it.
        file.set_len(0).unwrap();
        for taken in 1..=core.capacity() {
            assert!(core.end_all("it is gone", true).is_empty());
            let ended = core.take_ended().unwrap();
            assert_eq!(ended.status, Status::ABORTED_BY_HOST);
            assert_eq!(core.outstanding(), core.capacity() - taken);
        }
        assert!(core.take_ended().is_none());
        assert!(!sq.is_poisoned());
    }
}
