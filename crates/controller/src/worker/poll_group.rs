//! Which controllers a worker looks at: the active apart from the idle.
//!
//! A host with hundreds of virtual machines has mostly idle ones. If each of them were looked at in
//! every pass, armed before every sleep and disarmed after it, all would pay for the few that do
//! something. So a worker does that for its *active* controllers only. The others are
//!
//! * *parked*, where a doorbell says that they have something to do. A controller is parked as a
//!   worker goes to sleep: it is declared asleep in a state cell of its own, its doorbells are
//!   armed, a full fence is passed, and everything is looked at once more; only if nothing is found
//!   it stays there, and is then left out of passes and of the worker's own sleep. Whoever delivers
//!   a doorbell write stores the register, passes a fence and reads that cell. So one of the two
//!   sees the other: the last look sees the write, or the write sees the controller parked, and
//!   leaves a message that names it. From there on it is a message as all others, which a worker
//!   never sleeps through. Only the first who sees it parked leaves one; who sees that somebody is
//!   about to relies on that one's, which is still to come and has the controller looked at as a
//!   whole. (The crate `doorbell` has all this as a model: `tests/loom/park.rs`.) An eventfd that a
//!   host signals instead stays signalled until the worker has taken it, in its sleep or now and
//!   then while it is awake.
//! * *dormant*, where there is no such doorbell: the doorbells are mapped, or the worker is one
//!   that polls for ever, whose hosts have been promised that they never ring. These are visited in
//!   turn, a few of them in each pass and all of them before a sleep.
//!
//! Only a controller that is quiescent is either: nothing in flight, no interrupt held back, nobody
//! who waits for it. Any message for it makes it active first.

use super::backlog::Unread;
use super::controller_queues::ControllerQueues;
use super::observer::Observer;
use super::queue_set::SleepCell;
use super::share::{self, Share};
use super::slow::SlowTurns;
use rustix::event::epoll;
use shadowbell_doorbell::Sleeper;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Sleeps in a row for which a controller was armed in vain until it is parked. Armed or parked, it
/// rings at its next command; but parked it also rings while the worker is awake for others.
const PARK_AFTER: u32 = 8;
/// Under a worker that does not sleep: how long there was nothing to do for it. Its host then rings
/// at most so often.
const PARK_AFTER_TIME: Duration = Duration::from_millis(10);
/// Passes between two looks at the clock for that.
const REVIEW: u32 = 1024;
/// Commands in the time of which a dormant controller is visited: some percent of a worker's time.
const VISIT: u32 = 32;
/// What a pass counts for in this, and how many in a row that found nothing make it a whole visit:
/// the worker then has nothing better to do.
const VISIT_PER_PASS: u32 = 2;
const STILL: u32 = 64;
/// Passes that found nothing, or half as many commands, after which a worker that is awake checks
/// descriptors: some tens of microseconds.
const CHECK_AFTER: u32 = 512;

/// A controller in the group.
pub(super) struct PollEntry {
    pub(super) queues: ControllerQueues,
    /// Its own state, for while it is parked.
    sleeper: Sleeper<SleepCell>,
    /// What had been done for it in the last sleep, and in how many sleeps since when.
    done: u64,
    idle_streak: u32,
    /// What had been done for it at the last review.
    reviewed: u64,
    share: Share,
    slow: SlowTurns,
}

impl PollEntry {
    /// Whether the worker is about to sleep once more without anything having been done for it.
    fn is_idle(&mut self) -> bool {
        let done = self.queues.progress();
        self.idle_streak = if done == self.done { self.idle_streak.saturating_add(1) } else { 0 };
        self.done = done;
        self.idle_streak > PARK_AFTER
    }

    /// Whether nothing has been done for it since the last review.
    fn was_idle_since_review(&mut self) -> bool {
        let done = self.queues.progress();
        std::mem::replace(&mut self.reviewed, done) == done
    }

    /// Declares it asleep, if there is nothing to do for it: whether it is.
    fn park(&mut self, trace: &mut Option<Observer>) -> bool {
        if !self.queues.is_quiescent() {
            return false;
        }
        let mut arming = self.sleeper.prepare();
        self.queues.arm(&mut arming, trace);
        let mut fenced = arming.fence();
        // Quiescent, so no interrupt is held back.
        let due = self.queues.recheck(&mut fenced, trace);
        fenced.note(due.is_some());
        if let Some(asleep) = fenced.try_sleep() {
            asleep.stay();
            return true;
        }
        self.queues.disarm(&self.sleeper);
        false
    }

    fn unpark(&mut self) {
        self.sleeper.rise();
        self.queues.disarm(&self.sleeper);
        self.idle_streak = 0;
    }

    fn has_eventfds(&self) -> bool {
        !self.queues.doorbell_eventfds().is_empty()
    }
}

/// It is in every pass again.
fn is_back(entry: &PollEntry) {
    entry.queues.set_left_out(false);
}

/// The controllers of a worker.
pub(super) struct PollGroup {
    #[allow(clippy::vec_box, reason = "they move from here to there")]
    pub(super) active: Vec<Box<PollEntry>>,
    /// By controller: one that is parked is not on its way out, so there are no two.
    parked: HashMap<u32, Box<PollEntry>>,
    dormant: VecDeque<Box<PollEntry>>,
    /// Whether the worker never sleeps.
    always: bool,
    /// Of the parked, how many ring by a descriptor.
    parked_with_eventfd: usize,
    /// How much was done since descriptors were checked, in the measure of [`CHECK_AFTER`].
    unchecked: u32,
    /// How much was done since dormant controllers were visited, in the measure of [`VISIT`]; and
    /// passes in a row that found nothing.
    unvisited: u32,
    still: u32,
    /// Passes since the last look at the clock, and the last review.
    passes: u32,
    reviewed: Instant,
    /// `shadowbell_memory::sigbus::faults` when it was last looked at.
    faults: u64,
}

impl PollGroup {
    pub(super) fn new(always: bool) -> Self {
        Self {
            active: Vec::new(),
            parked: HashMap::new(),
            dormant: VecDeque::new(),
            always,
            parked_with_eventfd: 0,
            unchecked: 0,
            unvisited: 0,
            still: 0,
            passes: 0,
            reviewed: Instant::now(),
            faults: shadowbell_memory::sigbus::faults(),
        }
    }

    /// Takes in a new one.
    pub(super) fn add(&mut self, queues: ControllerQueues, state: SleepCell) {
        let sleeper = Sleeper::new(state);
        self.active.push(Box::new(PollEntry {
            queues,
            sleeper,
            done: 0,
            idle_streak: 0,
            reviewed: 0,
            share: Share::default(),
            slow: SlowTurns::default(),
        }));
    }

    /// The queues of a controller, which is active from here on. Not old ones of the same
    /// controller that are still on their way out.
    pub(super) fn activate(&mut self, id: u32) -> Option<&mut ControllerQueues> {
        self.doorbell_written(id);
        if let Some(at) = self.dormant.iter().position(|entry| entry.queues.id() == id) {
            self.active.extend(self.dormant.remove(at).inspect(|entry| is_back(entry)));
        }
        let mut active = self.active.iter_mut().map(|entry| &mut entry.queues);
        active.find(|t| t.id() == id && !t.is_detaching())
    }

    /// Whether the queues of a controller are here, and not on their way out.
    pub(super) fn has(&self, id: u32) -> bool {
        let mut others = self.active.iter().chain(&self.dormant).map(|entry| &entry.queues);
        self.parked.contains_key(&id) || others.any(|t| t.id() == id && !t.is_detaching())
    }

    /// The trace begins here.
    pub(super) fn begin_trace(&mut self) {
        let left_out = self.dormant.iter_mut().chain(self.parked.values_mut());
        let all = self.active.iter_mut().chain(left_out);
        all.for_each(|entry| entry.queues.begin_trace());
    }

    /// Whether any disk has something in hand.
    pub(super) fn is_pending(&self) -> bool {
        self.active.iter().any(|entry| entry.queues.is_pending())
    }

    /// How many requests have ended at the disks of those that are active.
    pub(super) fn ended(&self) -> u64 {
        self.active.iter().map(|entry| entry.queues.ended()).fold(0, u64::wrapping_add)
    }

    /// A doorbell of a controller was written.
    pub(super) fn doorbell_written(&mut self, id: u32) {
        if let Some(mut entry) = self.parked.remove(&id) {
            self.parked_with_eventfd -= usize::from(entry.has_eventfds());
            entry.unpark();
            is_back(&entry);
            self.active.push(entry);
        }
    }

    /// A pass over the queues of all active controllers. How much there was to do, in commands.
    #[inline(always)]
    pub(super) fn pass(&mut self, unread: Unread<'_>, trace: &mut Option<Observer>) -> u32 {
        if let [only] = &mut self.active[..]
            && self.parked.is_empty()
            && self.dormant.is_empty()
        {
            return only.queues.pass(share::ALONE, unread, trace);
        }
        self.pass_by_shares(unread, trace)
    }

    /// A pass in which each gets its share.
    #[inline(never)]
    fn pass_by_shares(&mut self, unread: Unread<'_>, trace: &mut Option<Observer>) -> u32 {
        let mut work = 0;
        let mut now = Instant::now();
        let is_alone = self.active.len() == 1;
        let mut busy = 0;
        for entry in &mut self.active {
            let PollEntry { queues, share, slow, .. } = &mut **entry;
            let budget = if is_alone { share::ALONE } else { share.begin() };
            let before = slow.begin();
            let done = queues.pass(budget, unread, trace);
            if done != 0 {
                work += done;
                busy += 1;
                let after = Instant::now();
                let took = after.duration_since(now);
                share.spend(took);
                if slow.end(before, after, took) {
                    queues.report_slow(took);
                }
                now = after;
            }
        }
        if busy == 1 {
            // Nobody else had anything to do, so nothing was taken from anybody.
            self.active.iter_mut().for_each(|entry| entry.share.forgive());
        }
        work
    }

    /// Before a sleep, in which all but the parked are armed: parks those that have been armed in
    /// vain for a while. One stays active, so that a worker's only controller takes no detour.
    pub(super) fn park_idle(&mut self, trace: &mut Option<Observer>) {
        self.active.extend(self.dormant.drain(..).inspect(|entry| is_back(entry)));
        let mut index = 0;
        while self.active.len() > 1
            && let Some(entry) = self.active.get_mut(index)
        {
            if entry.is_idle() && !entry.queues.is_mapped() && !self.always && entry.park(trace) {
                self.keep_parked(index);
            } else {
                index += 1;
            }
        }
    }

    fn keep_parked(&mut self, index: usize) {
        let entry = self.active.swap_remove(index);
        self.parked_with_eventfd += usize::from(entry.has_eventfds());
        entry.queues.set_left_out(true);
        self.parked.insert(entry.queues.id(), entry);
    }

    /// After a pass in which there was so much to do: looks after those that were not in it. How
    /// much there was to do for them.
    #[inline]
    pub(super) fn check_others(
        &mut self,
        work: u32,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        if shadowbell_memory::sigbus::faults() != self.faults {
            self.check_memory();
        }
        if self.active.len() <= 1 && self.parked_with_eventfd == 0 && self.dormant.is_empty() {
            return 0;
        }
        self.check_others_slowly(work, unread, trace)
    }

    #[inline(never)]
    fn check_others_slowly(
        &mut self,
        work: u32,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        if self.active.len() > 1 {
            self.passes += 1;
            if self.passes >= REVIEW {
                self.review(trace);
            }
        }
        if self.parked_with_eventfd != 0 {
            self.unchecked = self.unchecked.saturating_add(1 + 2 * work);
        }
        if self.dormant.is_empty() { 0 } else { self.visit(work, unread, trace) }
    }

    /// Whether descriptors are to be checked although the worker is awake.
    #[inline]
    pub(super) fn must_check_eventfds(&self) -> bool {
        self.unchecked >= CHECK_AFTER
    }

    /// Descriptors were checked: whether all of them.
    pub(super) fn checked(&mut self, all: bool) {
        self.unchecked = if all { 0 } else { CHECK_AFTER };
    }

    #[cold]
    fn check_memory(&mut self) {
        self.faults = shadowbell_memory::sigbus::faults();
        let left_out = self.dormant.iter_mut().chain(self.parked.values_mut());
        let entries = self.active.iter_mut().chain(left_out);
        entries.for_each(|entry| entry.queues.check_memory());
    }

    #[cold]
    fn review(&mut self, trace: &mut Option<Observer>) {
        self.passes = 0;
        let now = Instant::now();
        if now.duration_since(self.reviewed) < PARK_AFTER_TIME {
            return;
        }
        self.reviewed = now;
        let mut index = 0;
        while self.active.len() > 1
            && let Some(entry) = self.active.get_mut(index)
        {
            if !entry.was_idle_since_review() {
                index += 1;
            } else if self.always || entry.queues.is_mapped() {
                if entry.queues.is_quiescent() {
                    let entry = self.active.swap_remove(index);
                    entry.queues.set_left_out(true);
                    self.dormant.push_back(entry);
                } else {
                    index += 1;
                }
            } else if entry.park(trace) {
                self.keep_parked(index);
            } else {
                index += 1;
            }
        }
    }

    fn visit(&mut self, work: u32, unread: Unread<'_>, trace: &mut Option<Observer>) -> u32 {
        self.still = if work == 0 { self.still.saturating_add(1) } else { 0 };
        self.unvisited += if self.still > STILL { VISIT } else { VISIT_PER_PASS + work };
        let mut found = 0;
        for _ in 0..(self.unvisited / VISIT).min(self.dormant.len() as u32) {
            let Some(mut entry) = self.dormant.pop_front() else { break };
            let work = entry.queues.pass(entry.share.begin(), unread, trace);
            if work == 0 {
                self.dormant.push_back(entry);
            } else {
                found += work;
                is_back(&entry);
                self.active.push(entry);
            }
        }
        self.unvisited %= VISIT;
        found
    }

    /// Lets those go whose time here, at `worker`, is over.
    #[cold]
    pub(super) fn remove_over(&mut self, epoll: &OwnedFd, worker: usize) {
        for index in (0..self.active.len()).rev() {
            if self.active[index].queues.is_over() {
                let mut entry = self.active.swap_remove(index);
                for fd in entry.queues.wake_fds() {
                    let _ = epoll::delete(epoll, fd);
                }
                // The host has a duplicate of it, so closing ours would not take it out.
                for event in entry.queues.doorbell_eventfds() {
                    let _ = epoll::delete(epoll, event);
                }
                if !entry.queues.depart(worker) {
                    entry.queues.retire();
                }
                // Dropping it lets its latch go: from here on nothing touches the host's memory.
                drop(entry);
            }
        }
    }
}
