//! Gives way to others on a processor on which a thread polls.

use std::time::{Duration, Instant};

/// Lets others run who want the processor of a thread that polls.
///
/// Who polls uses up its time slice, though it only waits. A thread that has just been woken on the
/// same processor gets it when that slice is over, which takes milliseconds, and often it is the
/// one that what is waited for comes from. `sched_yield` lets it run at once, takes a third of a
/// microsecond if there is nobody, and says by the time that it took whether there was.
///
/// Who computes all the time takes a whole slice whenever it may. Nothing is waited for from such a
/// one, and it gets its share anyway: it is given way to for a small part of the time only.
#[derive(Clone, Copy, Debug)]
pub struct GiveWay {
    /// Not again before.
    next: Instant,
}

/// Between two yields.
const EACH: Duration = Duration::from_micros(3);
/// A yield that took so long had somebody else run. Interrupts take less, mostly.
const SOMEBODY: Duration = Duration::from_micros(5);
/// And one that took so long had somebody run who waits for nothing.
const SLICE: Duration = Duration::from_micros(500);
/// How many times as long nobody is given way to after that.
const PAUSE: u32 = 16;

impl GiveWay {
    /// How long a wait has to have lasted: what is quicker should find nobody in a system call.
    pub const AFTER: Duration = Duration::from_micros(2);

    /// Of a thread that begins to poll.
    #[must_use]
    pub fn new() -> Self {
        Self { next: Instant::now() }
    }

    /// The thread has polled in vain for as long as `waited`, and looks again after this. Whether
    /// somebody else wanted the processor, for a moment.
    #[cold]
    pub fn give_way(&mut self, waited: Duration) -> bool {
        self.give_way_by(waited, Instant::now, std::thread::yield_now)
    }

    fn give_way_by(
        &mut self,
        waited: Duration,
        clock: impl Fn() -> Instant,
        yields: impl FnOnce(),
    ) -> bool {
        if waited < Self::AFTER {
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
        self.next = after + if is_slice { took * PAUSE } else { EACH };
        took >= SOMEBODY && !is_slice
    }
}

impl Default for GiveWay {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// A thread that polls, in virtual time.
    struct Poller {
        way: GiveWay,
        now: Cell<Instant>,
        yields: u32,
    }

    impl Poller {
        fn new() -> Self {
            let way = GiveWay::new();
            Self { now: Cell::new(way.next), way, yields: 0 }
        }

        /// After so long, with others who run for so many microseconds if they may.
        fn polls(&mut self, waited: u64, others: u64) -> bool {
            let Self { way, now, yields } = self;
            let runs = || {
                *yields += 1;
                now.set(now.get() + Duration::from_micros(others));
            };
            way.give_way_by(Duration::from_micros(waited), || now.get(), runs)
        }

        fn computes(&mut self, micros: u64) {
            self.now.set(self.now.get() + Duration::from_micros(micros));
        }
    }

    #[test]
    fn a_short_wait_yields_to_nobody() {
        let mut poller = Poller::new();
        assert!(!poller.polls(1, 20));
        assert_eq!(poller.yields, 0);
        assert!(poller.polls(2, 20));
        assert_eq!(poller.yields, 1);
    }

    #[test]
    fn it_yields_now_and_then_and_says_whether_somebody_ran() {
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
    fn who_takes_whole_slices_is_given_few() {
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
