//! State shared by the threads of a run and its schedule: current phase and progress counters.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Current phase of the run: written by the schedule, read by all threads.
#[derive(Debug)]
pub(super) struct Phase {
    now: AtomicU32,
    /// Time without completions after which a device is considered dead.
    pub(super) stall_timeout: Duration,
    /// Number of threads that have started, plus number of threads that have begun to measure.
    reached: AtomicU32,
}

/// Phase in the low bits, and number of ended intervals of the time line in the high bits: one
/// word, so that the threads' loop needs one load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Now(u32);

const PART_BITS: u32 = 2;
pub(super) const RAMP: u32 = 0;
pub(super) const RUN: u32 = 1;
pub(super) const STOP: u32 = 2;
pub(super) const ABANDON: u32 = 3;

impl Now {
    pub(super) const START: Self = Self(RAMP);

    #[inline]
    pub(super) fn part(self) -> u32 {
        self.0 & ((1 << PART_BITS) - 1)
    }

    pub(super) fn intervals(self) -> u32 {
        self.0 >> PART_BITS
    }
}

impl Phase {
    pub(super) fn ramp(stall_timeout: Duration) -> Self {
        Self { now: AtomicU32::new(RAMP), stall_timeout, reached: AtomicU32::new(0) }
    }

    /// Begins the measurement.
    pub(super) fn run(&self) {
        self.set(RUN);
    }

    /// Ends submission.
    pub(super) fn stop(&self) {
        self.set(STOP);
    }

    /// Ends the run without waiting for I/Os in flight, because the controller is gone.
    pub(super) fn abandon(&self) {
        self.set(ABANDON);
    }

    /// Ends an interval of the time line. Only the schedule calls this, and [`run`](Self::run),
    /// [`stop`](Self::stop) and [`abandon`](Self::abandon).
    pub(super) fn end_interval(&self) {
        self.now.fetch_add(1 << PART_BITS, Ordering::Relaxed);
    }

    fn set(&self, part: u32) {
        let intervals = self.get().intervals() << PART_BITS;
        self.now.store(intervals | part, Ordering::Relaxed);
    }

    /// Number of calls of [`reach`](Self::reach). The schedule waits for it after a change of the
    /// phase, because threads may notice the change late on a busy machine.
    pub(super) fn reached(&self) -> usize {
        self.reached.load(Ordering::Acquire) as usize
    }

    /// Called by a thread when it has started, and when it has begun to measure.
    pub(super) fn reach(&self) {
        self.reached.fetch_add(1, Ordering::Release);
    }

    #[inline]
    pub(super) fn get(&self) -> Now {
        Now(self.now.load(Ordering::Relaxed))
    }
}

/// Number of I/Os that a thread has completed, read by the schedule. Aligned to its own cache
/// lines, so that the threads' counters do not share one.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Progress(AtomicU64);

impl Progress {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// Adds `found` completions. Only the thread that owns the counter calls it.
    pub(super) fn add(&self, found: u64) {
        self.0.store(self.get() + found, Ordering::Relaxed);
    }
}
