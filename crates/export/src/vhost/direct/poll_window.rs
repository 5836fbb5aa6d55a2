//! How long a queue's thread that has found nothing to do goes on looking before it sleeps.

use std::time::{Duration, Instant};

/// Passes in vain between two looks at the clock.
const PASSES: u32 = 64;
/// Passes in vain after which others go first who want this processor: some microseconds, in which
/// a guest that polls as well would have asked for more.
const POLITE_AFTER: u32 = 16 * PASSES;
/// The first window after a sleep that was worth polling for.
const FIRST: Duration = Duration::from_micros(8);

/// Grows while work comes soon after a sleep began, and shrinks while it does not.
#[derive(Debug)]
pub(super) struct PollWindow {
    most: Duration,
    window: Duration,
    passes: u32,
    since: Instant,
}

impl PollWindow {
    /// Polls for so long at most.
    pub(super) fn new(most: Duration) -> Self {
        Self { most, window: FIRST.min(most), passes: 0, since: Instant::now() }
    }

    /// There was something to do.
    #[inline]
    pub(super) fn found(&mut self) {
        self.passes = 0;
    }

    /// After a pass that found nothing: whether to look again before a sleep.
    #[inline]
    pub(super) fn looks_again(&mut self) -> bool {
        if self.window.is_zero() {
            return false;
        }
        std::hint::spin_loop();
        self.passes += 1;
        if self.passes % PASSES != 1 {
            return true;
        }
        self.look_at_clock()
    }

    #[cold]
    fn look_at_clock(&mut self) -> bool {
        let now = Instant::now();
        if self.passes == 1 {
            self.since = now;
            return true;
        }
        if now.saturating_duration_since(self.since) >= self.window {
            return false;
        }
        if self.passes > POLITE_AFTER {
            std::thread::yield_now();
        }
        true
    }

    /// It has slept for so long.
    pub(super) fn slept(&mut self, time: Duration) {
        self.passes = 0;
        self.window = if time < self.most {
            (self.window * 2).max(FIRST).min(self.most)
        } else if self.window > FIRST {
            self.window / 2
        } else {
            Duration::ZERO
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The length of a window.
    const MOST: Duration = Duration::from_micros(50);

    #[test]
    fn the_window_follows_how_soon_work_comes() {
        let mut window = PollWindow::new(MOST);
        assert!(window.looks_again());
        for _ in 0..5 {
            window.slept(MOST / 2);
        }
        assert_eq!(window.window, MOST);
        for _ in 0..4 {
            window.slept(MOST * 2);
        }
        assert!(!window.looks_again(), "nothing came for long");
        window.slept(MOST / 2);
        assert!(window.looks_again());
    }

    #[test]
    fn it_ends_unless_there_is_something_to_do() {
        let mut window = PollWindow::new(MOST);
        let began = Instant::now();
        while window.looks_again() {
            assert!(began.elapsed() < shadowbell_testing::wait::LIMIT);
        }
        window.found();
        assert!(window.looks_again());
        assert!(!PollWindow::new(Duration::ZERO).looks_again());
    }
}
