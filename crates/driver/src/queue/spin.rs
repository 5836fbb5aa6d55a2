//! How long to look before sleeping.

use std::time::Duration;

/// Spin, then sleep: how long a thread that waits for completions polls before it sleeps until an
/// interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinPolicy {
    /// The most that it polls. Zero sleeps at once.
    pub max: Duration,
    /// Adapt: poll longer while completions arrive soon after sleeping began, and shorter after
    /// waits that were long. Otherwise always poll for `max`.
    pub adaptive: bool,
}

impl SpinPolicy {
    /// Never polls.
    pub const SLEEP: Self = Self { max: Duration::ZERO, adaptive: false };
}

impl Default for SpinPolicy {
    /// Adaptive, up to 50 us: about what a sleep and an interrupt cost.
    fn default() -> Self {
        Self { max: Duration::from_micros(50), adaptive: true }
    }
}

/// The window that a [`SpinPolicy`] has arrived at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinWindow {
    policy: SpinPolicy,
    window: Duration,
}

/// The smallest window that is worth having.
const FLOOR: Duration = Duration::from_micros(2);

impl SpinWindow {
    pub(crate) fn new(policy: SpinPolicy) -> Self {
        Self { policy, window: policy.max }
    }

    /// For how long to poll now.
    pub(crate) fn window(&self) -> Duration {
        self.window
    }

    /// A wait is over after `waited`, with sleep in it or not.
    pub(crate) fn waited(&mut self, waited: Duration) {
        if !self.policy.adaptive {
            return;
        }
        self.window = if waited <= self.window {
            self.window
        } else if waited <= self.policy.max {
            // A little more patience would have saved a sleep.
            (self.window * 2).max(FLOOR).min(self.policy.max)
        } else {
            // No patience that we are allowed would have: do not spend what there is.
            let half = self.window / 2;
            if half < FLOOR { Duration::ZERO } else { half }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_follows_the_waits() {
        let us = Duration::from_micros;
        let mut spin = SpinWindow::new(SpinPolicy { max: us(40), adaptive: true });
        assert_eq!(spin.window(), us(40));
        spin.waited(us(30));
        assert_eq!(spin.window(), us(40), "found while polling");
        for expected in [20, 10, 5, 2, 0, 0] {
            spin.waited(us(500));
            assert_eq!(spin.window().as_micros(), expected);
        }
        for expected in [2, 4, 8, 16, 32, 40] {
            spin.waited(us(40));
            assert_eq!(spin.window(), us(expected).min(us(40)));
        }
    }

    #[test]
    fn a_fixed_window_stays() {
        let mut spin =
            SpinWindow::new(SpinPolicy { max: Duration::from_micros(9), adaptive: false });
        spin.waited(Duration::from_secs(1));
        assert_eq!(spin.window(), Duration::from_micros(9));
        assert_eq!(SpinWindow::new(SpinPolicy::SLEEP).window(), Duration::ZERO);
    }
}
