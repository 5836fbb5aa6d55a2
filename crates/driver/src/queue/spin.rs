//! How long to look before sleeping.

use shadowbell_memory::YieldBackoff;
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
    /// Adaptive, up to 100 us: what the flash behind a queue takes, at least where a sleep would
    /// add its own 30 us and more.
    fn default() -> Self {
        Self { max: Duration::from_micros(100), adaptive: true }
    }
}

/// The window that a [`SpinPolicy`] has arrived at.
///
/// A wait with a sleep in it says little about what polling would have taken: the interrupt and the
/// way back onto a processor are in it, too, which can be as much again. A device that answers
/// within the most that is allowed seems not to, once the queue sleeps. So it looks for as long as
/// it may every now and then, to see.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpinWindow {
    policy: SpinPolicy,
    window: Duration,
    /// Waits in a row that polling has not covered.
    missed: u32,
    /// Sleeps until it tries the most again, and how many that were the last time.
    until_try: u32,
    between: u32,
    others: YieldBackoff,
}

/// The smallest window that is worth having.
const FLOOR: Duration = Duration::from_micros(2);
/// So many waits that were too long are chance.
const BAD_LUCK: u32 = 2;
/// Sleeps between two tries: at first, and after many that were in vain, when they cost a
/// thousandth of the most for each wait.
const BETWEEN: std::ops::RangeInclusive<u32> = 16..=1024;

impl SpinWindow {
    pub(crate) fn new(policy: SpinPolicy) -> Self {
        let between = *BETWEEN.start();
        let window = policy.max;
        Self { policy, window, missed: 0, until_try: between, between, others: YieldBackoff::new() }
    }

    /// For how long to poll now.
    pub(crate) fn window(&self) -> Duration {
        if self.is_trying() { self.policy.max } else { self.window }
    }

    /// Nothing has come yet after `waited`: others go first who want this processor. It polls on
    /// whether somebody did or not: the controller is not kept by a thread that gives way, and is
    /// seen to have answered sooner by it than by one that has to be woken.
    pub(crate) fn give_way(&mut self, waited: Duration) {
        self.others.backoff(waited);
    }

    fn is_trying(&self) -> bool {
        self.policy.adaptive && self.until_try == 0
    }

    /// A wait is over after `waited`, with sleep in it or not.
    pub(crate) fn waited(&mut self, waited: Duration) {
        let Self { policy: SpinPolicy { max, adaptive }, .. } = *self;
        if !adaptive {
            return;
        }
        let trying = self.is_trying();
        if waited <= self.window() {
            self.missed = 0;
            if trying {
                (self.window, self.between) = (max, *BETWEEN.start());
                self.until_try = self.between;
            }
            return;
        }
        self.missed = self.missed.saturating_add(1);
        if trying {
            self.between = (self.between * 2).min(*BETWEEN.end());
            self.until_try = self.between;
        } else {
            self.until_try -= 1;
        }
        if waited <= max {
            // A slightly longer window would have saved a sleep.
            self.window = (self.window * 2).max(FLOOR).min(max);
        } else if self.missed > BAD_LUCK {
            // No window that is allowed would have: do not spend what there is.
            let half = self.window / 2;
            self.window = if half < FLOOR { Duration::ZERO } else { half };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(micros: u64) -> Duration {
        Duration::from_micros(micros)
    }

    /// What a sleep adds to a wait.
    const WAKEUP: Duration = us(30);

    fn adaptive(max: u64) -> SpinWindow {
        SpinWindow::new(SpinPolicy { max: us(max), adaptive: true })
    }

    /// A wait for a device that takes so long. How long it was polled for, and whether in vain.
    fn wait(spin: &mut SpinWindow, takes: u64) -> (Duration, bool) {
        let (takes, window) = (us(takes), spin.window());
        let slept = window < takes;
        spin.waited(if slept { takes + WAKEUP } else { takes });
        (window.min(takes), slept)
    }

    /// The last half of so many waits: the time polled for each, and sleeps for each.
    fn waits(spin: &mut SpinWindow, takes: &[u64], count: usize) -> (f64, f64) {
        let all: Vec<_> =
            takes.iter().cycle().take(count).map(|takes| wait(spin, *takes)).collect();
        let half = &all[count / 2..];
        let each = |sum: f64| sum / half.len() as f64;
        let polled = each(half.iter().map(|(polled, _)| polled.as_secs_f64() * 1e6).sum());
        (polled, each(half.iter().filter(|(_, slept)| *slept).count() as f64))
    }

    #[test]
    fn the_window_follows_the_waits() {
        let mut spin = adaptive(40);
        assert_eq!(spin.window(), us(40));
        spin.waited(us(30));
        assert_eq!(spin.window(), us(40), "found while polling");
        for expected in [40, 40, 20, 10, 5, 2, 0, 0] {
            spin.waited(us(500));
            assert_eq!(spin.window().as_micros(), expected);
        }
        for expected in [2, 4, 8, 16, 32, 40] {
            spin.waited(us(40));
            assert_eq!(spin.window(), us(expected).min(us(40)));
        }
    }

    #[test]
    fn what_a_sleep_adds_does_not_keep_it_asleep() {
        // The device is as quick as is allowed; with a sleep it does not seem so.
        let mut spin = adaptive(50);
        (0..10).for_each(|_| spin.waited(us(5000)));
        assert_eq!(spin.window(), Duration::ZERO);
        let (polled, slept) = waits(&mut spin, &[35], 200);
        assert!((polled, slept) == (35.0, 0.0), "{polled} us, {slept} sleeps");
    }

    #[test]
    fn now_and_then_a_long_wait_changes_nothing() {
        let mut spin = adaptive(50);
        let mut takes = vec![35; 20];
        takes.extend([900, 900]);
        let (_, slept) = waits(&mut spin, &takes, 2200);
        assert!((slept - 2.0 / 22.0).abs() < 1e-9, "{slept} sleeps");
    }

    #[test]
    fn a_slow_device_is_hardly_polled() {
        let (polled, slept) = waits(&mut adaptive(50), &[500], 20_000);
        assert!(polled < 0.1 && slept == 1.0, "{polled} us, {slept} sleeps");
        // And whenever it gets quick, that is seen.
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
