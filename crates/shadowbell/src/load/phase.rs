//! What the threads of a run and its schedule share: the part that the run is in, and counters.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// What part of the run it is: written by the schedule, looked at by all threads.
#[derive(Debug)]
pub(super) struct Phase {
    now: AtomicU8,
    /// A device that completes nothing for so long is given up.
    pub(super) stall_timeout: Duration,
    /// Threads that have begun to work, and those that have begun to measure.
    reached: AtomicU32,
}

pub(super) const RAMP: u8 = 0;
pub(super) const RUN: u8 = 1;
pub(super) const STOP: u8 = 2;
pub(super) const ABANDON: u8 = 3;

impl Phase {
    pub(super) fn ramp(stall_timeout: Duration) -> Self {
        Self { now: AtomicU8::new(RAMP), stall_timeout, reached: AtomicU32::new(0) }
    }

    /// What comes from now on is measured.
    pub(super) fn run(&self) {
        self.now.store(RUN, Ordering::Relaxed);
    }

    /// Nothing more is submitted.
    pub(super) fn stop(&self) {
        self.now.store(STOP, Ordering::Relaxed);
    }

    /// What is in flight will never complete.
    pub(super) fn abandon(&self) {
        self.now.store(ABANDON, Ordering::Relaxed);
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
    pub(super) fn get(&self) -> u8 {
        self.now.load(Ordering::Relaxed)
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
