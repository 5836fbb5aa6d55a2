//! How long a worker that has found nothing to do goes on looking before it sleeps.

use crate::worker::moderation::Patience;
use std::time::{Duration, Instant};

/// When a worker that has found nothing to do goes to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// After a window that grows while work returns soon after it went to sleep and shrinks while
    /// it does not, up to this long.
    Adaptive(Duration),
    /// Never: a processor per worker, and no doorbell ever rings.
    Always,
    /// At once.
    Never,
}

impl Polling {
    /// How long interrupts may be held back by a worker that waits so.
    pub(super) fn patience(self) -> Patience {
        match self {
            Self::Adaptive(most) => Patience::of(most),
            Self::Always => Patience::of(LONGEST_HOLD),
            Self::Never => Patience::NONE,
        }
    }
}

impl Default for Polling {
    fn default() -> Self {
        Self::Adaptive(LONGEST_HOLD)
    }
}

/// How long a worker waits for the next command, and with it how long an interrupt is held back, if
/// nobody says otherwise.
const LONGEST_HOLD: Duration = Duration::from_micros(100);
/// Idle passes between two looks at the clock.
const PASSES: u32 = 64;
/// Idle passes after which a worker gives way to others while it polls: some microseconds, in which
/// a host that polls as well would have answered.
const POLITE_AFTER: u32 = 8 * PASSES;
/// The first window after a sleep that was worth spinning for.
const FIRST_WINDOW: Duration = Duration::from_micros(8);

/// What a worker does after a pass that found nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It looks again.
    Look,
    /// It looks again, and whoever else wants this processor goes first: on a small host that is the
    /// VMM's thread with the interrupt that the next command waits for.
    Yield,
    /// It goes to sleep.
    Sleep,
}

/// The polling of one worker.
#[derive(Debug)]
pub(super) struct Window {
    polling: Polling,
    width: Duration,
    /// Passes in a row that found nothing.
    idle: u32,
    /// When they began, or nearly.
    since: Instant,
}

impl Window {
    pub(super) fn new(polling: Polling) -> Self {
        Self { polling, width: Duration::ZERO, idle: 0, since: Instant::now() }
    }

    pub(super) fn polling(&self) -> Polling {
        self.polling
    }

    /// A pass has found something, or the worker is about to sleep.
    #[inline]
    pub(super) fn restart(&mut self) {
        self.idle = 0;
    }

    /// A pass has found nothing.
    #[inline]
    pub(super) fn next(&mut self) -> Next {
        self.idle = self.idle.wrapping_add(1);
        let width = match self.polling {
            Polling::Always => return Next::Look,
            Polling::Never => return Next::Sleep,
            Polling::Adaptive(_) => self.width,
        };
        if width.is_zero() {
            return Next::Sleep;
        }
        if !self.idle.is_multiple_of(PASSES) {
            return Next::Look;
        }
        let now = Instant::now();
        if self.idle == PASSES {
            self.since = now;
        }
        if now.duration_since(self.since) >= width {
            Next::Sleep
        } else if self.idle >= POLITE_AFTER {
            Next::Yield
        } else {
            Next::Look
        }
    }

    /// The worker has slept for so long.
    pub(super) fn slept(&mut self, slept: Duration) {
        if let Polling::Adaptive(most) = self.polling {
            self.width = adapt(self.width, slept, most);
        }
    }
}

/// The next window, after a sleep of `slept`. As KVM's haltpoll does it: grow when spinning a bit
/// longer would have saved the sleep, shrink when it would have been in vain.
fn adapt(window: Duration, slept: Duration, most: Duration) -> Duration {
    if slept < most {
        (window * 2).max(FIRST_WINDOW).min(most)
    } else if window <= FIRST_WINDOW {
        Duration::ZERO
    } else {
        window / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_follows_the_load() {
        let most = Duration::from_micros(100);
        let mut window = Duration::ZERO;
        for _ in 0..10 {
            window = adapt(window, Duration::from_micros(20), most);
        }
        assert_eq!(window, most);
        for _ in 0..10 {
            window = adapt(window, Duration::from_secs(1), most);
        }
        assert_eq!(window, Duration::ZERO);
    }
}
