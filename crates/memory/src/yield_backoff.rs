//! Backoff of a polling thread by `sched_yield`.

use std::time::{Duration, Instant};

/// Yields the processor of a polling thread to other runnable threads.
///
/// A polling thread uses its whole time slice, although it only waits. Another thread that is woken
/// on the same processor has to wait until that slice ends. That takes milliseconds. Often this
/// other thread produces the awaited event. `sched_yield` lets it run at once. If no other thread
/// is runnable, `sched_yield` takes a third of a microsecond, so its duration shows whether another
/// thread ran.
///
/// A compute-bound thread uses a whole slice whenever it runs. It does not produce the awaited
/// event, and gets its share of the processor even without yields. So the polling thread yields to
/// it only rarely.
#[derive(Clone, Copy, Debug)]
pub struct YieldBackoff {
    /// Time before which the thread does not yield again.
    next: Instant,
}

/// Time between two yields.
const YIELD_INTERVAL: Duration = Duration::from_micros(3);
/// Minimum duration of a yield from which another thread is assumed to have run. Most interrupts
/// are shorter, so they are not mistaken for a thread.
const MIN_OTHER_RUN: Duration = Duration::from_micros(5);
/// Minimum duration of a yield from which a compute-bound thread is assumed to have run.
const SLICE: Duration = Duration::from_micros(500);
/// Pause after a yield to a compute-bound thread, as a multiple of that yield's duration.
const PAUSE: u32 = 16;

impl YieldBackoff {
    /// Time for which a thread polls before its first yield. An event that arrives within this time
    /// finds the thread polling, and not in a system call.
    pub const MIN_WAIT: Duration = Duration::from_micros(2);

    /// Creates the state of a thread that starts to poll.
    #[must_use]
    pub fn new() -> Self {
        Self { next: Instant::now() }
    }

    /// Yields if `waited`, the time for which the thread has polled without success, is long
    /// enough. Returns true if another thread, which is not compute-bound, used the processor
    /// meanwhile.
    #[cold]
    pub fn backoff(&mut self, waited: Duration) -> bool {
        self.backoff_by(waited, Instant::now, std::thread::yield_now)
    }

    fn backoff_by(
        &mut self,
        waited: Duration,
        clock: impl Fn() -> Instant,
        yields: impl FnOnce(),
    ) -> bool {
        if waited < Self::MIN_WAIT {
            return false;
        }
        let before = clock();
        if before < self.next {
            return false;
        }
        yields();
        let after = clock();
        let took = after.saturating_duration_since(before);
        let is_slice = took >= SLICE;
        self.next = after + if is_slice { took * PAUSE } else { YIELD_INTERVAL };
        took >= MIN_OTHER_RUN && !is_slice
    }
}

impl Default for YieldBackoff {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// Polling thread in virtual time.
    struct Poller {
        yield_backoff: YieldBackoff,
        now: Cell<Instant>,
        yields: u32,
    }

    impl Poller {
        fn new() -> Self {
            let yield_backoff = YieldBackoff::new();
            Self { now: Cell::new(yield_backoff.next), yield_backoff, yields: 0 }
        }

        /// Calls `backoff` after a wait of `waited` µs. If it yields, other threads run for
        /// `others` µs.
        fn polls(&mut self, waited: u64, others: u64) -> bool {
            let Self { yield_backoff, now, yields } = self;
            let runs = || {
                *yields += 1;
                now.set(now.get() + Duration::from_micros(others));
            };
            yield_backoff.backoff_by(Duration::from_micros(waited), || now.get(), runs)
        }

        fn computes(&mut self, micros: u64) {
            self.now.set(self.now.get() + Duration::from_micros(micros));
        }
    }

    #[test]
    fn a_short_wait_does_not_yield() {
        let mut poller = Poller::new();
        assert!(!poller.polls(1, 20));
        assert_eq!(poller.yields, 0);
        assert!(poller.polls(2, 20));
        assert_eq!(poller.yields, 1);
    }

    #[test]
    fn the_backoff_yields_periodically_and_detects_other_threads() {
        let mut poller = Poller::new();
        for _ in 0..300 {
            assert!(!poller.polls(10, 0));
            poller.computes(1);
        }
        assert_eq!(poller.yields, 100, "every three microseconds");
        poller.computes(3);
        assert!(poller.polls(10, 30));
        poller.computes(3);
        assert!(!poller.polls(10, 1));
        poller.computes(3);
        assert!(poller.polls(10, 30));
    }

    #[test]
    fn threads_that_use_whole_time_slices_get_few_yields() {
        let mut poller = Poller::new();
        let began = poller.now.get();
        for _ in 0..100_000 {
            assert!(!poller.polls(10, 3500), "nothing to be taken into account");
            poller.computes(10);
        }
        let whole = poller.now.get() - began;
        let given = Duration::from_micros(3500) * poller.yields;
        assert!(poller.yields > 10 && given * (PAUSE + 1) <= whole + given, "{given:?} {whole:?}");
    }
}
