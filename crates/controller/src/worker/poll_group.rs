//! Poll group: separates the active controllers of an I/O thread from the idle ones.
//!
//! On a host with hundreds of virtual machines, most are idle. If every pass polled all controllers
//! and every sleep armed all doorbells, the few active controllers would pay for the idle ones. So
//! an I/O thread polls and arms only *active* controllers. Idle controllers are
//!
//! * *parked*, if a doorbell write signals new commands. The thread parks a controller when the
//!   thread itself goes to sleep: it sets the controller's state cell to asleep, arms the
//!   controller's doorbells, executes a full fence, and checks everything once more. If it finds no
//!   work, the controller stays parked, and is excluded from passes and from the arming of later
//!   sleeps. The writer of a doorbell stores the register, executes a fence, and reads the state
//!   cell. Thus at least one side sees the other: the recheck sees the write, or the writer sees
//!   the parked controller and sends a message with its number. A thread never sleeps with unread
//!   messages. Only the first writer that sees the controller parked sends a message. Other writers
//!   need not wait for it, because after its receipt the thread checks all doorbells of the
//!   controller. (The crate `doorbell` has a model of this protocol: `tests/loom/park.rs`.) A
//!   doorbell eventfd stays signalled until the thread drains it, either when the eventfd ends the
//!   thread's sleep, or in a periodic check while the thread is awake.
//! * *dormant*, if no doorbell write signals new commands. This is so with mapped doorbells, or if
//!   the thread polls always and has told its hosts that they need no doorbell writes. The thread
//!   visits dormant controllers in rotation, a few in each pass, and all of them before a sleep.
//!
//! Only a quiescent controller is parked or dormant: nothing in flight, no held interrupt, no
//! waiting latch. Any message for it makes it active first.

use super::controller_queues::ControllerQueues;
use super::mailbox::Unread;
use super::observer::Observer;
use super::queue_set::SleepCell;
use super::scheduling::{self, Share, SlowTurns};
use crate::outstanding::Outstanding;
use rustix::event::epoll;
use shadowbell_doorbell::Sleeper;
use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Number of consecutive sleeps of the thread without work for a controller after which the
/// controller is parked. It is not parked earlier, because parking has a price: the next command of
/// a parked controller needs a doorbell write even while the thread is awake.
const PARK_AFTER: u32 = 8;
/// Idle time after which a controller is parked or becomes dormant while the thread stays awake. So
/// a host needs at most one additional doorbell write in this time.
const PARK_AFTER_TIME: Duration = Duration::from_millis(10);
/// Number of passes between two readings of the clock for [`PARK_AFTER_TIME`].
const REVIEW: u32 = 1024;
/// Amount of work, in commands, between two visits of dormant controllers; each visit polls one
/// dormant controller. The visits take a few percent of the thread's time.
const DORMANT_CHECK_WORK: u32 = 32;
/// Work that each pass counts for [`DORMANT_CHECK_WORK`] in addition to its commands; and number of
/// consecutive idle passes after which every pass visits a dormant controller, because the thread
/// is idle anyway.
const WORK_PER_PASS: u32 = 2;
const STILL: u32 = 64;
/// Amount of work between two checks of the eventfds of parked controllers by an awake thread. A
/// pass counts 1 and a command 2, so the interval is some tens of microseconds.
const CHECK_AFTER: u32 = 512;

/// Controller in the poll group.
pub(super) struct PollEntry {
    pub(super) queues: ControllerQueues,
    /// Sleep state of the controller: asleep while the controller is parked. Doorbell writers read
    /// this state.
    sleeper: Sleeper<SleepCell>,
    /// Progress counter of the queues at the last sleep of the thread, and the number of
    /// consecutive sleeps without progress.
    done: u64,
    idle_streak: u32,
    /// Progress counter of the queues at the last review.
    reviewed: u64,
    share: Share,
    slow: SlowTurns,
}

impl PollEntry {
    /// Counts a sleep of the thread. True if the controller has made no progress in more than
    /// [`PARK_AFTER`] sleeps.
    fn is_idle(&mut self) -> bool {
        let done = self.queues.progress();
        self.idle_streak = if done == self.done { self.idle_streak.saturating_add(1) } else { 0 };
        self.done = done;
        self.idle_streak > PARK_AFTER
    }

    /// True if the controller has made no progress since the last review.
    fn was_idle_since_review(&mut self) -> bool {
        let done = self.queues.progress();
        std::mem::replace(&mut self.reviewed, done) == done
    }

    /// Parks the controller, unless there is work for it. Returns true if it is parked.
    fn park(&mut self, trace: &mut Option<Observer>) -> bool {
        if !self.queues.is_quiescent() {
            return false;
        }
        let mut arming = self.sleeper.prepare();
        self.queues.arm(&mut arming, trace);
        let mut fenced = arming.fence();
        // A quiescent controller holds no interrupt, so the recheck returns no deadline.
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

/// Publishes in the statistics that the thread polls the controller in its passes again.
fn is_back(entry: &PollEntry) {
    entry.queues.set_skipped(false);
}

/// Number of idle passes between two checks of completion queue heads, for a thread that never
/// sleeps.
const CHECK_HEADS: u32 = 1 << 12;

/// Controllers of an I/O thread.
pub(super) struct PollGroup {
    #[allow(clippy::vec_box, reason = "they move from here to there")]
    pub(super) active: Vec<Box<PollEntry>>,
    /// Parked controllers by number. A thread may have two entries for the same controller. One of
    /// the two then contains queues that are being detached, and is never parked.
    parked: HashMap<u32, Box<PollEntry>>,
    dormant: VecDeque<Box<PollEntry>>,
    /// True if the thread never sleeps.
    always: bool,
    /// Idle passes since the last check of completion queue heads, if the thread never sleeps.
    idle_passes: u32,
    /// Number of parked controllers with doorbell eventfds.
    parked_with_eventfd: usize,
    /// Work since the last check of eventfds, in the unit of [`CHECK_AFTER`].
    unchecked: u32,
    /// Work since the last visit of a dormant controller, in the unit of [`DORMANT_CHECK_WORK`];
    /// and the number of consecutive idle passes.
    unvisited: u32,
    still: u32,
    /// Passes since the last reading of the clock, and the time of the last review.
    passes: u32,
    reviewed: Instant,
    /// `shadowbell_memory::sigbus::faults` at the last check.
    faults: u64,
}

impl PollGroup {
    pub(super) fn new(always: bool) -> Self {
        Self {
            active: Vec::new(),
            parked: HashMap::new(),
            dormant: VecDeque::new(),
            always,
            idle_passes: 0,
            parked_with_eventfd: 0,
            unchecked: 0,
            unvisited: 0,
            still: 0,
            passes: 0,
            reviewed: Instant::now(),
            faults: shadowbell_memory::sigbus::faults(),
        }
    }

    /// Adds a controller.
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

    /// Activates a controller and returns its queues. Queues of the same controller that are being
    /// detached are not returned.
    pub(super) fn activate(&mut self, id: u32) -> Option<&mut ControllerQueues> {
        self.doorbell_written(id);
        if let Some(at) = self.dormant.iter().position(|entry| entry.queues.id() == id) {
            self.active.extend(self.dormant.remove(at).inspect(|entry| is_back(entry)));
        }
        let mut active = self.active.iter_mut().map(|entry| &mut entry.queues);
        active.find(|t| t.id() == id && !t.is_detaching())
    }

    /// Queues of a controller that are being detached.
    pub(super) fn detaching(&mut self, id: u32) -> impl Iterator<Item = &mut ControllerQueues> {
        let all = self.active.iter_mut().chain(&mut self.dormant).map(|entry| &mut entry.queues);
        all.filter(move |queues| queues.id() == id && queues.is_detaching())
    }

    /// Logs the disks that have not answered the requests of a controller.
    pub(super) fn log_pending(&self, id: u32) {
        let all = self.active.iter().chain(&self.dormant).map(|entry| &entry.queues);
        all.filter(|queues| queues.id() == id).for_each(ControllerQueues::log_pending);
    }

    /// Outstanding commands of all controllers, except parked ones, which have none.
    pub(super) fn outstanding(&self) -> impl Iterator<Item = Outstanding> {
        self.active.iter().chain(&self.dormant).map(|entry| entry.queues.outstanding())
    }

    /// Starts a trace.
    pub(super) fn begin_trace(&mut self) {
        let skipped = self.dormant.iter_mut().chain(self.parked.values_mut());
        let all = self.active.iter_mut().chain(skipped);
        all.for_each(|entry| entry.queues.begin_trace());
    }

    /// True if requests are in flight.
    pub(super) fn is_pending(&self) -> bool {
        self.active.iter().any(|entry| entry.queues.is_pending())
    }

    /// Number of requests of active controllers that have ended so far.
    pub(super) fn ended(&self) -> u64 {
        self.active.iter().map(|entry| entry.queues.ended()).fold(0, u64::wrapping_add)
    }

    /// Handles a doorbell write: activates the controller if it is parked.
    pub(super) fn doorbell_written(&mut self, id: u32) {
        if let Some(mut entry) = self.parked.remove(&id) {
            self.parked_with_eventfd -= usize::from(entry.has_eventfds());
            entry.unpark();
            is_back(&entry);
            self.active.push(entry);
        }
    }

    /// Makes a pass over all active controllers. Returns the amount of work, in commands.
    #[inline(always)]
    pub(super) fn pass(&mut self, unread: Unread<'_>, trace: &mut Option<Observer>) -> u32 {
        if let [only] = &mut self.active[..]
            && self.parked.is_empty()
            && self.dormant.is_empty()
        {
            return only.queues.pass(scheduling::SOLE, unread, trace);
        }
        self.pass_by_shares(unread, trace)
    }

    /// Makes a pass in which each active controller gets its share of time.
    #[inline(never)]
    fn pass_by_shares(&mut self, unread: Unread<'_>, trace: &mut Option<Observer>) -> u32 {
        let mut work = 0;
        let mut now = Instant::now();
        let is_alone = self.active.len() == 1;
        let mut busy = 0;
        for entry in &mut self.active {
            let PollEntry { queues, share, slow, .. } = &mut **entry;
            let budget = if is_alone { scheduling::SOLE } else { share.begin() };
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
            // Only one controller had work, so it has delayed no other, and its deficit is cleared.
            self.active.iter_mut().for_each(|entry| entry.share.forgive());
        }
        work
    }

    /// Prepares a sleep: activates dormant controllers, so that their doorbells are armed, and
    /// parks controllers that got no work in the last sleeps. One controller always stays active:
    /// the only controller of a thread is never parked.
    pub(super) fn park_idle(&mut self, trace: &mut Option<Observer>) {
        self.active.extend(self.dormant.drain(..).inspect(|entry| is_back(entry)));
        let mut index = 0;
        while self.active.len() > 1
            && let Some(entry) = self.active.get_mut(index)
        {
            if entry.is_idle() && !entry.queues.is_mapped() && !self.always && entry.park(trace) {
                self.repark(index);
            } else {
                index += 1;
            }
        }
    }

    fn repark(&mut self, index: usize) {
        let entry = self.active.swap_remove(index);
        self.parked_with_eventfd += usize::from(entry.has_eventfds());
        entry.queues.set_skipped(true);
        self.parked.insert(entry.queues.id(), entry);
    }

    /// Runs the checks after a pass with this amount of work: checks for lost memory, reviews idle
    /// controllers and visits dormant ones. Returns the amount of work found.
    #[inline]
    pub(super) fn run_checks(
        &mut self,
        work: u32,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        if shadowbell_memory::sigbus::faults() != self.faults {
            self.check_memory();
        }
        if self.always && work == 0 {
            self.idle_passes += 1;
            if self.idle_passes == CHECK_HEADS {
                self.check_heads(trace);
            }
        }
        if self.active.len() <= 1 && self.parked_with_eventfd == 0 && self.dormant.is_empty() {
            return 0;
        }
        self.run_slow_checks(work, unread, trace)
    }

    #[inline(never)]
    fn run_slow_checks(
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
        if self.dormant.is_empty() { 0 } else { self.poll_dormant(work, unread, trace) }
    }

    /// True if eventfds have to be checked although the thread is awake.
    #[inline]
    pub(super) fn must_check_eventfds(&self) -> bool {
        self.unchecked >= CHECK_AFTER
    }

    /// Records that the eventfds were checked. If `all` is false, more of them may be signalled,
    /// and the next pass checks again.
    pub(super) fn checked(&mut self, all: bool) {
        self.unchecked = if all { 0 } else { CHECK_AFTER };
    }

    /// Reads the heads of all completion queues. Commands cause reads of only some heads, and an
    /// invalid value of another one would not be found.
    #[cold]
    fn check_heads(&mut self, trace: &mut Option<Observer>) {
        self.idle_passes = 0;
        let entries = self.active.iter_mut().chain(&mut self.dormant);
        entries.for_each(|entry| entry.queues.check_heads(trace));
    }

    #[cold]
    fn check_memory(&mut self) {
        self.faults = shadowbell_memory::sigbus::faults();
        let skipped = self.dormant.iter_mut().chain(self.parked.values_mut());
        let entries = self.active.iter_mut().chain(skipped);
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
                    entry.queues.set_skipped(true);
                    self.dormant.push_back(entry);
                } else {
                    index += 1;
                }
            } else if entry.park(trace) {
                self.repark(index);
            } else {
                index += 1;
            }
        }
    }

    fn poll_dormant(&mut self, work: u32, unread: Unread<'_>, trace: &mut Option<Observer>) -> u32 {
        self.still = if work == 0 { self.still.saturating_add(1) } else { 0 };
        self.unvisited +=
            if self.still > STILL { DORMANT_CHECK_WORK } else { WORK_PER_PASS + work };
        let mut found = 0;
        for _ in 0..(self.unvisited / DORMANT_CHECK_WORK).min(self.dormant.len() as u32) {
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
        self.unvisited %= DORMANT_CHECK_WORK;
        found
    }

    /// Removes controllers whose queues are detached or move to another thread.
    #[cold]
    pub(super) fn remove_finished(&mut self, epoll: &OwnedFd, worker: usize) {
        for index in (0..self.active.len()).rev() {
            if self.active[index].queues.can_be_removed() {
                let mut entry = self.active.swap_remove(index);
                entry.queues.unwatch_disks(epoll);
                // The eventfd is removed explicitly. Closing it would not be sufficient, because
                // the host has a duplicate of it.
                for event in entry.queues.doorbell_eventfds() {
                    let _ = epoll::delete(epoll, event);
                }
                if !entry.queues.depart(worker) {
                    entry.queues.retire();
                }
                // This drop releases the latches of a detach. Thus the control plane learns that
                // nothing accesses guest memory any more.
                drop(entry);
            }
        }
    }
}
