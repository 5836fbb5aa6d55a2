//! Commands that were under way in a process that is dead, and those of which it may have died.
//!
//! Those that are recorded are carried out again, all at once. If the next process dies as well,
//! one of them may be the reason; then they are carried out one at a time ([`Turn`]). Those that
//! are not recorded are fetched again: the first burst of each queue one at a time, and of each it
//! is written down that it is being started. The command with which a third process dies is completed
//! with an error and not carried out again, and no other one is blamed.
//!
//! Only a death by a fault counts ([`Death`](crate::Death)). Who kills processes three times in a
//! row kills them while they have commands in hand, and often the same one.

use super::backlog::Unread;
use super::observer::Observer;
use super::queue_set::{BURST, QueueSet};
use super::replay::{Inheritance, Replay, SuspectQueue};
use std::collections::VecDeque;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The right to have a command in hand that may kill the process. There is one in the process, so
/// that no other command is blamed. A disk may not answer, and nobody else is to wait for that: who
/// has had it for a while has it no longer.
struct Turn(u64);

/// When the turn was taken; 0 if nobody has it.
static TAKEN: AtomicU64 = AtomicU64::new(0);
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// How long a turn is at most.
const LONGEST_TURN: Duration = Duration::from_secs(1);

impl Turn {
    fn take() -> Option<Self> {
        let now = 1 + START.elapsed().as_nanos() as u64;
        let before = TAKEN.load(Ordering::Relaxed);
        let is_free = before == 0 || now.saturating_sub(before) > LONGEST_TURN.as_nanos() as u64;
        let take = || TAKEN.compare_exchange(before, now, Ordering::AcqRel, Ordering::Relaxed);
        (is_free && take().is_ok()).then_some(Self(now))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Somebody else may have it.
        let _ = TAKEN.compare_exchange(self.0, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// A submission queue whose next commands are started one at a time.
struct Suspect {
    queue: SuspectQueue,
    /// Behind the last command that was there when the queue was first looked at.
    end: Option<u32>,
}

impl Suspect {
    /// With how many deaths command `count` had to do, which is about to be started: it was in the
    /// queue when the process before died.
    fn deaths_of(&self, count: u32) -> u8 {
        let was_there = self.queue.is_of_a_fault
            && self.end.is_some_and(|end| end.wrapping_sub(count) as i32 > 0);
        let known = if count == self.queue.begin { self.queue.deaths } else { 0 };
        known.max(u8::from(was_there))
    }

    /// Whether a queue that is at `count` has none any more that may have killed a process.
    fn is_over(&self, count: u32) -> bool {
        count.wrapping_sub(self.queue.begin) >= BURST
    }
}

/// What the queues of one controller on one worker still have of a process that is dead.
pub(crate) struct Recovery {
    replays: VecDeque<Replay>,
    suspects: Vec<Suspect>,
    /// The submission queue whose command has the turn.
    turn: Option<(usize, Turn)>,
}

impl Recovery {
    /// Of what a process begins with, if it is anything.
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

    /// What other queues have, which have come to the same worker.
    pub(crate) fn join(&mut self, other: Self) {
        let Self { replays, suspects, turn } = other;
        self.replays.extend(replays);
        self.suspects.extend(suspects);
        self.turn = self.turn.take().or(turn);
    }

    /// Whether nothing is left.
    pub(crate) fn is_over(&self) -> bool {
        self.replays.is_empty() && self.suspects.is_empty() && self.turn.is_none()
    }

    /// Whether there are commands to be carried out again.
    pub(crate) fn has_replays(&self) -> bool {
        !self.replays.is_empty()
    }

    /// Whether one of them has to be alone.
    pub(crate) fn has_some_to_be_alone(&self) -> bool {
        self.replays.iter().any(Replay::has_to_be_alone)
    }

    /// Whether a command is under way that is suspected.
    pub(crate) fn has_turn(&self) -> bool {
        self.turn.is_some()
    }

    /// Starts what can be started. How many commands.
    pub(crate) fn go_on(
        &mut self,
        set: &mut QueueSet,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        self.end_turn(set);
        let mut started = 0;
        for _ in 0..self.replays.len() {
            // Who waits for the queues to leave waits for these.
            if !set.engine.has_budget() || set.engine.is_full_for_replays() {
                break;
            }
            let Some(replay) = self.replays.pop_front() else { break };
            match self.replay(set, &replay) {
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

    /// Gives the turn back when the command has ended, and its completion is posted.
    fn end_turn(&mut self, set: &QueueSet) {
        let is_under_way = |sq: usize| {
            let Some(sq) = set.sqs.get(sq).and_then(Option::as_ref) else { return false };
            let cq = set.cqs.get(sq.cq).and_then(Option::as_ref);
            sq.in_flight != 0 || cq.is_some_and(|cq| cq.has_staged())
        };
        self.turn.take_if(|(sq, _)| !is_under_way(*sq));
    }

    /// Takes the turn for a submission queue, of which nothing must be under way.
    fn take_turn(&mut self, set: &QueueSet, sq: usize) -> bool {
        let is_idle =
            |sq: usize| set.sqs.get(sq).and_then(Option::as_ref).is_none_or(|sq| sq.in_flight == 0);
        if self.turn.is_none() && is_idle(sq) {
            self.turn = Turn::take().map(|turn| (sq, turn));
            return self.turn.is_some();
        }
        false
    }

    /// Starts a command again, unless it has to wait.
    fn replay(&mut self, set: &mut QueueSet, replay: &Replay) -> bool {
        if set.engine.waits_for_one() && !replay.has_to_be_alone() {
            return false;
        }
        if replay.goes_alone() && !self.take_turn(set, replay.sq) {
            return false;
        }
        let has_started = set.replay(replay);
        if replay.goes_alone() && !has_started {
            self.turn = None;
        }
        has_started
    }

    /// Whether a queue is served as any other one from here on.
    fn is_beyond(&self, set: &mut QueueSet, at: usize) -> bool {
        let Some(suspect) = self.suspects.get(at) else { return true };
        let index = suspect.queue.sq;
        let Some(sq) = set.sqs.get_mut(index).and_then(Option::as_mut) else { return true };
        let is_waited_for = self.is_exclusive(index);
        if sq.careful && (is_waited_for || !suspect.is_over(sq.fetched)) {
            return false;
        }
        sq.careful = false;
        true
    }

    /// Whether a command of the queue is or will be under way alone.
    fn is_exclusive(&self, index: usize) -> bool {
        self.turn.as_ref().is_some_and(|(of, _)| *of == index)
            || self.replays.iter().any(|replay| replay.sq == index && replay.goes_alone())
    }

    /// Fetches commands of a queue, a few at most.
    fn fetch(
        &mut self,
        set: &mut QueueSet,
        at: usize,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        let Some(index) = self.suspects.get(at).map(|suspect| suspect.queue.sq) else { return 0 };
        let tail = set.look_carefully(index, trace);
        if let Some(suspect) = self.suspects.get_mut(at)
            && let Some(sq) = set.sqs.get(index).and_then(Option::as_ref)
        {
            let waiting = tail.map_or(0, |tail| sq.layout.size.distance(sq.head, tail));
            suspect.end.get_or_insert(sq.fetched.wrapping_add(waiting));
        }
        if self.is_exclusive(index) {
            return 0;
        }
        let Some(tail) = tail else { return 0 };
        // As for any other command, what was said before counts first.
        if unread.has_of(set.shared.id) {
            return 1;
        }
        let mut fetched = 0;
        while set.engine.has_budget() && !set.engine.is_full() {
            let Some(suspect) = self.suspects.get(at) else { break };
            let Some(sq) = set.sqs.get(index).and_then(Option::as_ref) else { break };
            let waiting = sq.layout.size.distance(sq.head, tail);
            if waiting == 0 || suspect.is_over(sq.fetched) {
                break;
            }
            let deaths = suspect.deaths_of(sq.fetched);
            let Some(_turn) = Turn::take() else { break };
            if set.serve_one(index, deaths, trace) == 0 {
                break;
            }
            fetched += 1;
        }
        fetched
    }
}
