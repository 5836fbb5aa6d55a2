//! How long a worker has been awake, for others to read.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// How long a worker has been awake. The worker alone writes it, when it goes to sleep and when it
/// wakes up; anybody may read it.
#[derive(Debug)]
pub(crate) struct BusyClock {
    started: Instant,
    /// While the worker sleeps: twice the nanoseconds that it has been awake, and 1. While it is
    /// awake: twice the nanoseconds that it has slept.
    state: AtomicU64,
}

impl BusyClock {
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), state: AtomicU64::new(0) }
    }

    /// The worker goes to sleep at `now`.
    pub(crate) fn sleeps(&self, now: Instant) {
        let awake = nanos(now.saturating_duration_since(self.started)).saturating_sub(self.get());
        self.state.store(awake << 1 | 1, Relaxed);
    }

    /// The worker is awake again.
    pub(crate) fn wakes(&self) {
        let now = nanos(self.started.elapsed());
        self.state.store(now.saturating_sub(self.get()) << 1, Relaxed);
    }

    /// How long it has been awake.
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
    fn time_asleep_does_not_count() {
        let before = Instant::now();
        let clock = BusyClock::new();
        while clock.awake() < Duration::from_millis(2) {}
        let asleep = Instant::now();
        clock.sleeps(asleep);
        let awake = clock.awake();
        // Lower bound: the loop has waited for it.
        assert!(awake >= Duration::from_millis(2));
        // Not counted; longer is as good.
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(clock.awake(), awake);
        clock.wakes();
        assert!(clock.awake() >= awake);
        // The time asleep is missing.
        assert!(clock.awake() + Duration::from_millis(19) < before.elapsed());
    }
}
