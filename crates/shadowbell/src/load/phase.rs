//! What the threads of a run and its schedule share: the part that the run is in, and counters.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// What part of the run it is: written by the schedule, looked at by all threads.
#[derive(Debug)]
pub(super) struct Phase {
    now: AtomicU32,
    /// A device that completes nothing for so long is given up.
    pub(super) stall_timeout: Duration,
    /// Threads that have begun to work, and those that have begun to measure.
    reached: AtomicU32,
}

/// What part of the run it is, in the low bits of a word, so that a look at one word is enough; and
/// how many intervals of its timeline are over, in the others.
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

    /// What comes from now on is measured.
    pub(super) fn run(&self) {
        self.set(RUN);
    }

    /// Nothing more is submitted.
    pub(super) fn stop(&self) {
        self.set(STOP);
    }

    /// What is in flight will never complete.
    pub(super) fn abandon(&self) {
        self.set(ABANDON);
    }

    /// An interval of the timeline is over. Only for the schedule, as are the three above.
    pub(super) fn end_interval(&self) {
        self.now.fetch_add(1 << PART_BITS, Ordering::Relaxed);
    }

    fn set(&self, part: u32) {
        let intervals = self.get().intervals() << PART_BITS;
        self.now.store(intervals | part, Ordering::Relaxed);
    }

    /// How often a thread has begun to work, or to measure. On a machine that has other things to
    /// do that can be long after the phase has changed.
    pub(super) fn reached(&self) -> usize {
        self.reached.load(Ordering::Acquire) as usize
    }

    /// The calling thread has begun to work, or to measure.
    pub(super) fn reach(&self) {
        self.reached.fetch_add(1, Ordering::Release);
    }

    #[inline]
    pub(super) fn get(&self) -> Now {
        Now(self.now.load(Ordering::Relaxed))
    }
}

/// How many I/Os a thread has completed, for the schedule. On a cache line of its own: nobody
/// else's counter makes it wait.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Progress(AtomicU64);

impl Progress {
    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The calling thread, whose progress this is, has completed `found` more.
    pub(super) fn add(&self, found: u64) {
        self.0.store(self.get() + found, Ordering::Relaxed);
    }
}
