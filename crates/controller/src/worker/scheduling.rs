//! Scheduling of an I/O thread's time: deficit round robin, isolation of slow controllers,
//! utilization.
//!
//! # Deficit round robin
//!
//! Deficit round robin divides the thread's time between its controllers.
//!
//! In each turn of the thread, each active controller gets the same time quantum. Its commands are
//! fetched while some of the quantum is left. The last command may take longer than the rest of the
//! quantum; this deficit is deducted from the quanta of the following turns. So fewer long commands
//! are fetched than short ones, and a controller prolongs a turn by at most its quantum and one
//! command.
//!
//! During a pass, the estimated cost of each command is deducted before its execution
//! (`exec::quota::cost`). After the pass, the measured time of the pass is deducted from the share.
//! A thread with only one controller measures no time.
//!
//! # Isolation of slow controllers
//!
//! Controllers whose turns take too long are detected, and get a thread of their own.
//!
//! Most work of a turn is bounded by the quantum and by `exec::quota`, but some depends on a peer.
//! A client may punch holes in the memory that it shares, and a page fault of the thread in that
//! memory waits meanwhile. A disk may execute long requests inline. This module detects a
//! controller with repeated long turns. The controller then moves to an I/O thread of its own.
//!
//! A turn also takes long if the kernel preempts the thread, and then the controller is not the
//! cause. So the first long turn only starts a watch of the controller. A second long turn is
//! reported if, during this turn, the thread used that much CPU time itself or blocked.

use shadowbell_memory::ThreadUsage;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Time quantum per turn, in nanoseconds: about ten reads of 4 KiB.
const QUANTUM: i64 = 5_000;
/// Maximum deficit of a controller, in nanoseconds.
const DEBT: i64 = 40 * QUANTUM;
/// Budget of a pass, in nanoseconds, if only one controller of the thread is active. It bounds the
/// delay of a controller that becomes active during the pass.
pub(crate) const SOLE: i64 = 100_000;

/// Time that is left of a controller's quantum, in nanoseconds; a negative value is its deficit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Share {
    left: i64,
}

impl Share {
    /// Begins a turn: adds the quantum. Returns the budget in nanoseconds. If it is 0 or negative,
    /// no command may be fetched in this turn.
    pub(super) fn begin(&mut self) -> i64 {
        self.left = (self.left + QUANTUM).min(QUANTUM);
        self.left
    }

    /// Deducts the time of a pass from the share.
    pub(super) fn spend(&mut self, time: Duration) {
        let time = time.as_nanos().min(DEBT as u128) as i64;
        self.left = (self.left - time).max(-DEBT);
    }

    /// Clears the deficit.
    pub(super) fn forgive(&mut self) {
        self.left = self.left.max(0);
    }
}

/// Minimum duration of a turn that counts as long.
const MIN_LONG_TURN: Duration = Duration::from_millis(1);
/// Time after a long turn for which the controller is watched, so that a second long turn is
/// reported.
const WATCH_TIME: Duration = Duration::from_secs(10);

/// Detection of long turns of one controller.
#[derive(Debug, Default)]
pub(super) struct SlowTurns {
    watched_until: Option<Instant>,
    reported: bool,
}

impl SlowTurns {
    /// Begins a turn. If the controller is watched, returns the thread's resource usage so far.
    #[inline]
    pub(super) fn begin(&self) -> Option<ThreadUsage> {
        if self.watched_until.is_none() { None } else { self.measure() }
    }

    #[cold]
    fn measure(&self) -> Option<ThreadUsage> {
        (!self.reported).then(ThreadUsage::now)
    }

    /// Ends a turn at `now` that has taken `took`; `before` is the result of
    /// [`begin`](Self::begin). Returns true, only once, when the controller is found to be too slow
    /// to share the thread.
    #[inline]
    pub(super) fn end(
        &mut self,
        before: Option<ThreadUsage>,
        now: Instant,
        took: Duration,
    ) -> bool {
        (took >= MIN_LONG_TURN || before.is_some()) && self.review(before, now, took)
    }

    #[cold]
    fn review(&mut self, before: Option<ThreadUsage>, now: Instant, took: Duration) -> bool {
        if self.reported {
            return false;
        }
        if took < MIN_LONG_TURN {
            self.watched_until = self.watched_until.filter(|until| now < *until);
            return false;
        }
        self.watched_until = Some(now + WATCH_TIME);
        let Some(before) = before else { return false };
        let after = ThreadUsage::now();
        let worked = after.processor.saturating_sub(before.processor) >= MIN_LONG_TURN;
        self.reported = worked || after.waits != before.waits;
        self.reported
    }
}

/// Clock of the time that an I/O thread has been awake. The thread writes it when it goes to sleep
/// and when it wakes up; any thread may read it.
#[derive(Debug)]
pub(crate) struct BusyClock {
    started: Instant,
    /// While the thread sleeps: (nanoseconds awake << 1) | 1. While it is awake: nanoseconds
    /// asleep << 1.
    state: AtomicU64,
}

impl BusyClock {
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), state: AtomicU64::new(0) }
    }

    /// Records that the thread goes to sleep at `now`.
    pub(crate) fn sleeps(&self, now: Instant) {
        let awake = nanos(now.saturating_duration_since(self.started)).saturating_sub(self.get());
        self.state.store(awake << 1 | 1, Relaxed);
    }

    /// Records that the thread is awake again.
    pub(crate) fn wakes(&self) {
        let now = nanos(self.started.elapsed());
        self.state.store(now.saturating_sub(self.get()) << 1, Relaxed);
    }

    /// Time that the thread has been awake.
    pub(crate) fn awake(&self) -> Duration {
        let state = self.state.load(Relaxed);
        let nanoseconds = if state & 1 == 1 {
            state >> 1
        } else {
            nanos(self.started.elapsed()).saturating_sub(state >> 1)
        };
        Duration::from_nanos(nanoseconds)
    }

    fn get(&self) -> u64 {
        self.state.load(Relaxed) >> 1
    }
}

fn nanos(duration: Duration) -> u64 {
    duration.as_nanos().min(u128::from(u64::MAX >> 1)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_that_exceeds_its_share_waits_proportionally() {
        let mut share = Share::default();
        let mut turns = 0;
        for _ in 0..1000 {
            if share.begin() > 0 {
                turns += 1;
                share.spend(Duration::from_nanos(4 * QUANTUM as u64));
            }
        }
        assert!((249..=251).contains(&turns), "{turns}");
    }

    #[test]
    fn unused_shares_do_not_accumulate_and_debt_is_limited() {
        let mut share = Share::default();
        (0..1000).for_each(|_| {
            share.begin();
        });
        assert_eq!(share.begin(), QUANTUM);
        share.spend(Duration::from_secs(1000));
        share.spend(Duration::from_secs(1000));
        let turns = (0..).take_while(|_| share.begin() <= 0).count();
        assert_eq!(turns as i64, DEBT / QUANTUM);
    }

    /// Makes a turn that executes `work`. Returns true if the controller is reported.
    fn turn(slow: &mut SlowTurns, work: impl FnOnce()) -> bool {
        let (before, began) = (slow.begin(), Instant::now());
        work();
        let now = Instant::now();
        slow.end(before, now, now.duration_since(began))
    }

    fn compute() {
        let began = ThreadUsage::now().processor;
        while ThreadUsage::now().processor - began < 3 * MIN_LONG_TURN {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn the_second_long_turn_is_one_too_many() {
        // Two causes of a long turn: computation, and a blocking call.
        for work in [compute as fn(), || std::thread::sleep(2 * MIN_LONG_TURN)] {
            let mut slow = SlowTurns::default();
            assert!(!turn(&mut slow, work));
            assert!(turn(&mut slow, work));
            // The controller is reported only once.
            assert!(!turn(&mut slow, work));
        }
    }

    #[test]
    fn short_turns_are_not_watched_for_ever() {
        let mut slow = SlowTurns::default();
        let (now, long) = (Instant::now(), 2 * MIN_LONG_TURN);
        assert!(!slow.end(None, now, long));
        let before = slow.begin();
        assert!(before.is_some());
        assert!(!slow.end(before, now + WATCH_TIME, MIN_LONG_TURN / 2));
        assert!(slow.begin().is_none());
    }

    #[test]
    fn a_thread_without_a_processor_is_not_to_blame() {
        let mut slow = SlowTurns::default();
        let now = Instant::now();
        for _ in 0..10 {
            // Time has passed, but the thread has neither used CPU time nor blocked.
            let mut before = slow.begin();
            if let Some(before) = &mut before {
                *before = ThreadUsage::now();
            }
            assert!(!slow.end(before, now, 5 * MIN_LONG_TURN));
        }
    }

    #[test]
    fn time_asleep_does_not_count() {
        let before = Instant::now();
        let clock = BusyClock::new();
        while clock.awake() < Duration::from_millis(2) {}
        let asleep = Instant::now();
        clock.sleeps(asleep);
        let awake = clock.awake();
        assert!(awake >= Duration::from_millis(2));
        // The sleep must not be counted. It may be longer than requested.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(clock.awake(), awake);
        clock.wakes();
        assert!(clock.awake() >= awake);
        // The time of the sleep is not part of the awake time (1 ms is left as tolerance).
        assert!(clock.awake() + Duration::from_millis(19) < before.elapsed());
    }
}
