//! Adaptive polling time of a thread before it sleeps.

use shadowbell_memory::AdaptivePoll;
use std::time::{Duration, Instant};

/// Number of passes without work between two readings of the clock.
const PASSES: u32 = 64;
/// Time of polling without work after which the thread yields the processor. A client that also
/// polls would have sent more requests in this time.
const POLITE_AFTER: Duration = Duration::from_micros(5);

/// Polling time that grows while work arrives soon after the start of a sleep, and shrinks
/// otherwise.
#[derive(Debug)]
pub(crate) struct PollWindow {
    poll: AdaptivePoll,
    passes: u32,
    since: Instant,
}

impl PollWindow {
    /// Creates the state. The polling time is at most `most`.
    pub(crate) fn new(most: Duration) -> Self {
        Self {
            poll: AdaptivePoll::new(most, AdaptivePoll::FIRST),
            passes: 0,
            since: Instant::now(),
        }
    }

    /// Records that a pass found work.
    #[inline]
    pub(crate) fn found(&mut self) {
        self.passes = 0;
    }

    /// True if the thread should poll once more before a sleep. Called after a pass without work.
    #[inline]
    pub(crate) fn polls_again(&mut self) -> bool {
        if self.poll.window().is_zero() {
            return false;
        }
        std::hint::spin_loop();
        self.passes += 1;
        if self.passes % PASSES != 1 {
            return true;
        }
        self.check_deadlines()
    }

    /// As [`polls_again`](Self::polls_again), for a pass that makes a system call. The clock is
    /// read after each pass, because a system call takes longer than the clock.
    #[cfg(any(feature = "nbd", feature = "fuse"))]
    pub(crate) fn polls_again_by_call(&mut self) -> bool {
        if self.poll.window().is_zero() {
            return false;
        }
        self.passes += 1;
        self.check_deadlines()
    }

    #[cold]
    fn check_deadlines(&mut self) -> bool {
        let now = Instant::now();
        if self.passes == 1 {
            self.since = now;
            return true;
        }
        let waited = now.saturating_duration_since(self.since);
        if waited >= self.poll.window() {
            return false;
        }
        if waited > POLITE_AFTER {
            std::thread::yield_now();
        }
        true
    }

    /// Adapts the polling time to the duration of a sleep.
    pub(crate) fn slept(&mut self, time: Duration) {
        self.passes = 0;
        self.poll.slept(time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Longest polling time of these tests.
    const MAX_POLL: Duration = Duration::from_micros(50);

    #[test]
    fn the_polling_window_adapts_to_the_interval_of_work() {
        let mut window = PollWindow::new(MAX_POLL);
        assert!(window.polls_again());
        for _ in 0..5 {
            window.slept(MAX_POLL / 2);
        }
        assert_eq!(window.poll.window(), MAX_POLL);
        for _ in 0..4 {
            window.slept(MAX_POLL * 2);
        }
        assert!(!window.polls_again(), "nothing came for long");
        window.slept(MAX_POLL / 2);
        assert!(window.polls_again());
    }

    #[test]
    fn the_polling_window_ends_without_work() {
        let mut window = PollWindow::new(MAX_POLL);
        let began = Instant::now();
        while window.polls_again() {
            assert!(began.elapsed() < shadowbell_testing::wait::LIMIT);
        }
        window.found();
        assert!(window.polls_again());
        assert!(!PollWindow::new(Duration::ZERO).polls_again());
    }
}
