//! Adaptive polling before a sleep.

use shadowbell_memory::{AdaptivePoll, YieldBackoff};
use std::time::Duration;

/// Polling policy: maximum time that a thread polls for completions before it sleeps until an
/// interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinPolicy {
    /// Maximum polling time. With zero, the thread sleeps without polling.
    pub max: Duration,
    /// True to adapt the polling time: longer while completions arrive soon after the sleep begins,
    /// shorter after long waits. False to poll for `max` every time.
    pub adaptive: bool,
}

impl SpinPolicy {
    /// No polling.
    pub const SLEEP: Self = Self { max: Duration::ZERO, adaptive: false };
}

impl Default for SpinPolicy {
    /// Adaptive polling, up to 100 us. That is the latency of flash. A sleep would add 30 us or
    /// more to this latency.
    fn default() -> Self {
        Self { max: Duration::from_micros(100), adaptive: true }
    }
}

/// Current polling time of a [`SpinPolicy`].
///
/// A wait that includes a sleep overestimates the device's latency: it includes the interrupt and
/// the wakeup, and these can double the wait. So a fast device looks slow while the queue sleeps.
/// Therefore the queue regularly polls for the maximum time, as a trial.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinWindow {
    policy: SpinPolicy,
    poll: AdaptivePoll,
    /// Number of consecutive waits that took longer than the polling.
    missed: u32,
    /// Number of sleeps until the next trial. `trial_interval` is the number that was set after the
    /// last trial.
    until_trial: u32,
    trial_interval: u32,
    yield_backoff: YieldBackoff,
}

/// Number of consecutive long waits that are tolerated before the window is shortened.
const TOLERATED_WAITS: u32 = 2;
/// Sleeps between two trials: 16 after a success, up to 1024 after failures. At 1024, the trials
/// add a thousandth of the maximum polling time to the average wait.
const SLEEPS_BETWEEN_TRIALS: std::ops::RangeInclusive<u32> = 16..=1024;

impl SpinWindow {
    pub(crate) fn new(policy: SpinPolicy) -> Self {
        let trial_interval = *SLEEPS_BETWEEN_TRIALS.start();
        let (poll, yield_backoff) =
            (AdaptivePoll::new(policy.max, policy.max), YieldBackoff::new());
        Self { policy, poll, missed: 0, until_trial: trial_interval, trial_interval, yield_backoff }
    }

    /// Maximum duration of the next polling.
    pub(crate) fn window(&self) -> Duration {
        if self.is_trial() { self.policy.max } else { self.poll.window() }
    }

    /// Yields the processor to other threads after polling without success for `waited`. Polling
    /// continues afterwards, because a thread that yields does not delay the controller, and
    /// notices completions sooner than a thread that sleeps.
    pub(crate) fn yield_cpu(&mut self, waited: Duration) {
        self.yield_backoff.backoff(waited);
    }

    fn is_trial(&self) -> bool {
        self.policy.adaptive && self.until_trial == 0
    }

    /// Records a finished wait, with or without a sleep, and adapts the window.
    pub(crate) fn waited(&mut self, waited: Duration) {
        let Self { policy: SpinPolicy { max, adaptive }, .. } = *self;
        if !adaptive {
            return;
        }
        let trial = self.is_trial();
        if waited <= self.window() {
            self.missed = 0;
            if trial {
                self.poll.open();
                self.trial_interval = *SLEEPS_BETWEEN_TRIALS.start();
                self.until_trial = self.trial_interval;
            }
            return;
        }
        self.missed = self.missed.saturating_add(1);
        if trial {
            self.trial_interval = (self.trial_interval * 2).min(*SLEEPS_BETWEEN_TRIALS.end());
            self.until_trial = self.trial_interval;
        } else {
            self.until_trial -= 1;
        }
        if waited < max || self.missed > TOLERATED_WAITS {
            self.poll.slept(waited);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    /// Simulated time that a sleep adds to a wait.
    const WAKEUP: Duration = us(30);

    fn adaptive(max: u64) -> SpinWindow {
        SpinWindow::new(SpinPolicy { max: us(max), adaptive: true })
    }

    /// Simulates a wait for a device with latency `latency`. Returns the polling time, and true if
    /// the wait slept.
    fn wait(spin: &mut SpinWindow, latency: u64) -> (Duration, bool) {
        let (latency, window) = (us(latency), spin.window());
        let slept = window < latency;
        spin.waited(if slept { latency + WAKEUP } else { latency });
        (window.min(latency), slept)
    }

    /// Simulates `count` waits. Returns the averages of the second half: polling time and sleeps
    /// per wait.
    fn waits(spin: &mut SpinWindow, latency: &[u64], count: usize) -> (f64, f64) {
        let all: Vec<_> =
            latency.iter().cycle().take(count).map(|latency| wait(spin, *latency)).collect();
        let half = &all[count / 2..];
        let per_wait = |sum: f64| sum / half.len() as f64;
        let polled = per_wait(half.iter().map(|(polled, _)| polled.as_secs_f64() * 1e6).sum());
        (polled, per_wait(half.iter().filter(|(_, slept)| *slept).count() as f64))
    }

    #[test]
    fn the_window_follows_the_waits() {
        let mut spin = adaptive(40);
        assert_eq!(spin.window(), us(40));
        spin.waited(us(30));
        assert_eq!(spin.window(), us(40), "found while polling");
        for expected in [40, 40, 20, 10, 5, 0, 0] {
            spin.waited(us(500));
            assert_eq!(spin.window().as_micros(), expected);
        }
        for expected in [8, 16, 32, 40] {
            spin.waited(us(39));
            assert_eq!(spin.window(), us(expected).min(us(40)));
        }
    }

    #[test]
    fn wakeup_latency_does_not_prevent_polling() {
        // The device's latency is within the maximum, but a wait with a sleep takes longer.
        let mut spin = adaptive(50);
        (0..10).for_each(|_| spin.waited(us(5000)));
        assert_eq!(spin.window(), Duration::ZERO);
        let (polled, slept) = waits(&mut spin, &[35], 200);
        assert!((polled, slept) == (35.0, 0.0), "{polled} us, {slept} sleeps");
    }

    #[test]
    fn rare_long_waits_do_not_change_the_window() {
        let mut spin = adaptive(50);
        let mut latency = vec![35; 20];
        latency.extend([900, 900]);
        let (_, slept) = waits(&mut spin, &latency, 2200);
        assert!((slept - 2.0 / 22.0).abs() < 1e-9, "{slept} sleeps");
    }

    #[test]
    fn a_slow_device_is_hardly_polled() {
        let (polled, slept) = waits(&mut adaptive(50), &[500], 20_000);
        assert!(polled < 0.1 && slept == 1.0, "{polled} us, {slept} sleeps");
        // The policy notices when a slow device becomes fast.
        let mut spin = adaptive(50);
        (0..10_000).for_each(|_| _ = wait(&mut spin, 500));
        let (_, slept) = waits(&mut spin, &[35], 4000);
        assert!(slept == 0.0, "{slept} sleeps");
    }

    #[test]
    fn a_fixed_window_stays() {
        let mut spin = SpinWindow::new(SpinPolicy { max: us(9), adaptive: false });
        (0..100).for_each(|_| spin.waited(Duration::from_secs(1)));
        assert_eq!(spin.window(), us(9));
        let mut spin = SpinWindow::new(SpinPolicy::SLEEP);
        (0..100).for_each(|_| spin.waited(Duration::from_secs(1)));
        assert_eq!(spin.window(), Duration::ZERO);
    }
}
