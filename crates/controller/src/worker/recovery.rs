//! Crash recovery of commands in flight, and detection of commands that crash the server process.
//!
//! The process after a crash (the second one) executes all commands that have a journal record
//! again, at the same time. If the second process crashes as well, one of these commands may be the
//! cause. So the third process executes them one at a time ([`Turn`]). If the third process crashes
//! too, the command that was then in flight is not executed again, but completed with an error.
//! Other commands are not affected. Commands without a record are fetched again. After a crash, the
//! first burst of each queue is fetched one command at a time, and the journal contains the command
//! that is being started. There is an exception: if a disk does not complete a command within
//! [`LONGEST_TURN`], the next command is started nevertheless. If the process then crashes, the
//! older command counts as the cause.
//!
//! Only crashes by a fault count ([`CauseOfDeath`](crate::CauseOfDeath)). Kills by an administrator
//! do not count, because the same commands may be in flight at several kills without being the
//! cause.

use super::mailbox::Unread;
use super::observer::Observer;
use super::queue_set::{BURST, QueueSet};
use super::replay::{Inheritance, Replay, SuspectQueue};
use std::collections::VecDeque;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Mutual exclusion, in this process, of commands that may crash it. Only the command that holds
/// the turn is in flight, so a crash has a single suspect. A turn expires after [`LONGEST_TURN`],
/// because the other commands must not wait for ever for a hung disk. A second suspected command
/// may then be in flight.
struct Turns {
    /// Time when the current turn was taken, in nanoseconds; 0 if no turn is taken.
    taken: AtomicU64,
    /// Number of turns that were taken and not released, including expired ones.
    outstanding: AtomicU32,
}

static TURNS: Turns = Turns { taken: AtomicU64::new(0), outstanding: AtomicU32::new(0) };
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Maximum duration of a turn, after which another command may take the turn.
const LONGEST_TURN: Duration = Duration::from_secs(1);

impl Turns {
    /// Takes the turn. `now` is the current time in nanoseconds, at least 1. `None` if the turn is
    /// taken and has not expired.
    fn take(&self, now: u64) -> Option<Turn<'_>> {
        let before = self.taken.load(Ordering::Relaxed);
        let is_free = before == 0 || now.saturating_sub(before) > LONGEST_TURN.as_nanos() as u64;
        let take = || self.taken.compare_exchange(before, now, Ordering::AcqRel, Ordering::Relaxed);
        if !is_free || take().is_err() {
            return None;
        }
        let is_sole = self.outstanding.fetch_add(1, Ordering::AcqRel) == 0;
        Some(Turn { turns: self, taken: now, is_sole })
    }
}

/// Right to execute one suspected command. Dropping it releases the turn.
struct Turn<'a> {
    turns: &'a Turns,
    taken: u64,
    /// False if an older command, whose turn has expired, was still in flight at the start of the
    /// turn. If the process crashes, the older command is suspected instead of the command that
    /// holds the turn.
    is_sole: bool,
}

impl Turn<'static> {
    fn take() -> Option<Self> {
        TURNS.take(1 + START.elapsed().as_nanos() as u64)
    }
}

impl Turn<'_> {
    /// Number of crashes to write to the journal for the command that holds this turn. `crashes` is
    /// the number of crashes that the command may have caused so far. If this process crashes, the
    /// next process adds 1 to the written number. So 1 is subtracted here if an older command would
    /// be the suspect.
    fn crashes_to_store(&self, crashes: u8) -> u8 {
        crashes.saturating_sub(u8::from(!self.is_sole))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.turns.outstanding.fetch_sub(1, Ordering::AcqRel);
        // If this turn has expired and another command has taken it since, it is not cleared.
        let taken = &self.turns.taken;
        let _ = taken.compare_exchange(self.taken, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Submission queue whose next commands are started one at a time.
struct Suspect {
    queue: SuspectQueue,
    /// Position after the last command that was in the queue when this process first read the tail.
    /// `None` before that.
    end: Option<u32>,
}

impl Suspect {
    /// Number of crashes that the command at position `count` may have caused: at least 1 if the
    /// command may have been in the queue when the previous process crashed by a fault. The command
    /// is about to be started.
    fn crashes_of(&self, count: u32) -> u8 {
        let was_there = self.queue.is_of_a_fault
            && self.end.is_some_and(|end| end.wrapping_sub(count) as i32 > 0);
        let known = if count == self.queue.begin { self.queue.crashes } else { 0 };
        known.max(u8::from(was_there))
    }

    /// True if a queue at position `count` is past the commands that may have crashed the dead
    /// process.
    fn is_finished(&self, count: u32) -> bool {
        count.wrapping_sub(self.queue.begin) >= BURST
    }
}

/// Recovery state of one controller's queues on one I/O thread.
pub(crate) struct Recovery {
    replays: VecDeque<Replay>,
    suspects: Vec<Suspect>,
    /// Turn that a command of these queues holds, with the index of the command's submission queue.
    turn: Option<(usize, Turn<'static>)>,
}

impl Recovery {
    /// Starts the recovery of inherited commands; `None` if there is nothing to recover.
    pub(crate) fn new(inheritance: Inheritance, set: &mut QueueSet) -> Option<Box<Self>> {
        let Inheritance { replays, suspects } = inheritance;
        if replays.is_empty() && suspects.is_empty() {
            return None;
        }
        let suspect = |queue: SuspectQueue| {
            set.sqs.get_mut(queue.sq)?.as_mut()?.careful = true;
            Some(Suspect { queue, end: None })
        };
        let suspects = suspects.into_iter().filter_map(suspect).collect();
        Some(Box::new(Self { replays: replays.into(), suspects, turn: None }))
    }

    /// Adds the recovery of further queues that have moved to the same I/O thread.
    pub(crate) fn join(&mut self, other: Self) {
        let Self { replays, suspects, turn } = other;
        self.replays.extend(replays);
        self.suspects.extend(suspects);
        self.turn = self.turn.take().or(turn);
    }

    /// True if the recovery has ended.
    pub(crate) fn is_finished(&self) -> bool {
        self.replays.is_empty() && self.suspects.is_empty() && self.turn.is_none()
    }

    /// True if commands wait to be executed again.
    pub(crate) fn has_replays(&self) -> bool {
        !self.replays.is_empty()
    }

    /// True if a waiting command requires exclusive execution.
    pub(crate) fn needs_exclusive(&self) -> bool {
        self.replays.iter().any(Replay::needs_exclusive)
    }

    /// True if a suspected command is in flight.
    pub(crate) fn has_turn(&self) -> bool {
        self.turn.is_some()
    }

    /// Starts all commands that can be started now. Returns their number.
    pub(crate) fn advance(
        &mut self,
        set: &mut QueueSet,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        self.end_turn(set);
        let mut started = 0;
        for _ in 0..self.replays.len() {
            // Recovered commands are executed even while a move of the queues is pending.
            if !set.engine.has_budget() || set.engine.is_full_for_replays() {
                break;
            }
            let Some(mut replay) = self.replays.pop_front() else { break };
            match self.replay(set, &mut replay) {
                true => started += 1,
                false => self.replays.push_back(replay),
            }
        }
        let mut at = 0;
        while at < self.suspects.len() {
            if self.is_beyond(set, at) {
                self.suspects.swap_remove(at);
                continue;
            }
            started += self.fetch(set, at, unread, trace);
            at += 1;
        }
        started
    }

    /// Releases the turn if its command has ended and the completion was posted.
    fn end_turn(&mut self, set: &QueueSet) {
        let is_under_way = |sq: usize| {
            let Some(sq) = set.sqs.get(sq).and_then(Option::as_ref) else { return false };
            let cq = set.cqs.get(sq.cq).and_then(Option::as_ref);
            sq.in_flight != 0 || cq.is_some_and(|cq| cq.has_staged())
        };
        self.turn.take_if(|(sq, _)| !is_under_way(*sq));
    }

    /// Takes the turn for the next command of a submission queue, if no command of this queue is in
    /// flight and the turn is free. Returns true if the turn was taken.
    fn take_turn(&mut self, set: &QueueSet, sq: usize) -> bool {
        let is_idle =
            |sq: usize| set.sqs.get(sq).and_then(Option::as_ref).is_none_or(|sq| sq.in_flight == 0);
        if self.turn.is_none() && is_idle(sq) {
            self.turn = Turn::take().map(|turn| (sq, turn));
            return self.turn.is_some();
        }
        false
    }

    /// Starts a recovered command again. Returns false if the command has to wait.
    fn replay(&mut self, set: &mut QueueSet, replay: &mut Replay) -> bool {
        if set.engine.is_paused() && !replay.needs_exclusive() {
            return false;
        }
        if replay.needs_turn() && !self.take_turn(set, replay.sq) {
            return false;
        }
        let crashes = replay.command.crashes;
        if let Some((_, turn)) = self.turn.as_ref().filter(|_| replay.needs_turn()) {
            replay.command.crashes = turn.crashes_to_store(crashes);
        }
        let has_started = set.replay(replay);
        replay.command.crashes = crashes;
        if replay.needs_turn() && !has_started {
            self.turn = None;
        }
        has_started
    }

    /// True if a queue can be served normally from now on.
    fn is_beyond(&self, set: &mut QueueSet, at: usize) -> bool {
        let Some(suspect) = self.suspects.get(at) else { return true };
        let index = suspect.queue.sq;
        let Some(sq) = set.sqs.get_mut(index).and_then(Option::as_mut) else { return true };
        let is_waited_for = self.has_or_needs_turn(index);
        if sq.careful && (is_waited_for || !suspect.is_finished(sq.fetched)) {
            return false;
        }
        sq.careful = false;
        true
    }

    /// True if a command of the queue has the turn or will need it.
    fn has_or_needs_turn(&self, index: usize) -> bool {
        self.turn.as_ref().is_some_and(|(of, _)| *of == index)
            || self.replays.iter().any(|replay| replay.sq == index && replay.needs_turn())
    }

    /// Fetches commands of a suspected queue one at a time, up to the end of its first burst.
    fn fetch(
        &mut self,
        set: &mut QueueSet,
        at: usize,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        let Some(index) = self.suspects.get(at).map(|suspect| suspect.queue.sq) else { return 0 };
        let tail = set.poll_tail_of_one(index, trace);
        if let Some(suspect) = self.suspects.get_mut(at)
            && let Some(sq) = set.sqs.get(index).and_then(Option::as_ref)
        {
            let waiting = tail.map_or(0, |tail| sq.layout.size.distance(sq.head, tail));
            suspect.end.get_or_insert(sq.fetched.wrapping_add(waiting));
        }
        if self.has_or_needs_turn(index) {
            return 0;
        }
        let Some(tail) = tail else { return 0 };
        // As in the normal fetch, messages that were sent before the host moved the tail are
        // handled first.
        if unread.has_of(set.shared.id) {
            return 1;
        }
        let mut fetched = 0;
        while set.engine.has_budget() && !set.engine.is_full() {
            let Some(suspect) = self.suspects.get(at) else { break };
            let Some(sq) = set.sqs.get(index).and_then(Option::as_ref) else { break };
            let waiting = sq.layout.size.distance(sq.head, tail);
            if waiting == 0 || suspect.is_finished(sq.fetched) {
                break;
            }
            let crashes = suspect.crashes_of(sq.fetched);
            let Some(turn) = Turn::take() else { break };
            if set.serve_one(index, turn.crashes_to_store(crashes), trace) == 0 {
                break;
            }
            fetched += 1;
        }
        fetched
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_in_flight_with_an_expired_turn_is_not_suspected() {
        let turns = Turns { taken: AtomicU64::new(0), outstanding: AtomicU32::new(0) };
        let expiry = LONGEST_TURN.as_nanos() as u64;
        let first = turns.take(1).unwrap();
        assert_eq!(first.crashes_to_store(2), 2);
        assert!(turns.take(1 + expiry).is_none());
        let second = turns.take(2 + expiry).unwrap();
        assert_eq!(second.crashes_to_store(2), 1);
        drop(second);
        // The first command is still in flight, although its turn has expired.
        let third = turns.take(3 + expiry).unwrap();
        assert_eq!(third.crashes_to_store(2), 1);
        drop(first);
        assert!(turns.take(4 + expiry).is_none());
        drop(third);
        assert_eq!(turns.take(5 + expiry).unwrap().crashes_to_store(2), 2);
    }
}
