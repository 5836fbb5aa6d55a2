//! Adaptive polling window of a thread before it sleeps.

use std::time::Duration;

/// Time for which a thread polls before it sleeps, as in KVM's haltpoll: the window grows if
/// slightly longer polling would have avoided a sleep, otherwise it shrinks.
#[derive(Clone, Copy, Debug)]
pub struct AdaptivePoll {
    max: Duration,
    window: Duration,
}

impl AdaptivePoll {
    /// First window after a short sleep, and smallest useful window.
    pub const FIRST: Duration = Duration::from_micros(8);

    /// Creates a window of at most `max`, with the length `first`.
    #[must_use]
    pub fn new(max: Duration, first: Duration) -> Self {
        Self { max, window: first.min(max) }
    }

    /// Current length of the window.
    #[must_use]
    pub fn window(&self) -> Duration {
        self.window
    }

    /// Sets the window to its maximum, after polling for the maximum has found the event.
    pub fn open(&mut self) {
        self.window = self.max;
    }

    /// Adapts the window to the duration of a sleep.
    pub fn slept(&mut self, slept: Duration) {
        self.window = if slept < self.max {
            (self.window * 2).max(Self::FIRST).min(self.max)
        } else if self.window <= Self::FIRST {
            Duration::ZERO
        } else {
            self.window / 2
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_follows_the_sleeps() {
        let us = Duration::from_micros;
        let mut poll = AdaptivePoll::new(us(100), Duration::ZERO);
        for expected in [8, 16, 32, 64, 100, 100] {
            poll.slept(us(20));
            assert_eq!(poll.window(), us(expected));
        }
        for expected in [50_000, 25_000, 12_500, 6250, 0, 0] {
            poll.slept(us(100));
            assert_eq!(poll.window(), Duration::from_nanos(expected));
        }
        assert_eq!(AdaptivePoll::new(us(5), AdaptivePoll::FIRST).window(), us(5));
    }
}
