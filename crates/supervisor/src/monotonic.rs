//! Monotonic timestamps that another process of the same machine can read.

use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// Converts [`Instant`]s to microseconds of `CLOCK_MONOTONIC` and back.
pub(super) struct Monotonic {
    now: Instant,
    at: Duration,
}

impl Monotonic {
    pub(super) fn read_clock() -> Self {
        let at = Duration::try_from(clock_gettime(ClockId::Monotonic)).unwrap_or_default();
        Self { now: Instant::now(), at }
    }

    pub(super) fn write(&self, moment: Instant) -> u64 {
        let at = match moment.checked_duration_since(self.now) {
            Some(ahead) => self.at + ahead,
            None => self.at.saturating_sub(self.now - moment),
        };
        u64::try_from(at.as_micros()).unwrap_or(u64::MAX)
    }

    pub(super) fn read(&self, moment: u64) -> Instant {
        let moment = Duration::from_micros(moment);
        let read = match moment.checked_sub(self.at) {
            Some(ahead) => self.now.checked_add(ahead),
            None => self.now.checked_sub(self.at - moment),
        };
        read.unwrap_or(self.now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_the_same_by_another_clock() {
        let clock = Monotonic::read_clock();
        for moment in
            // One time in the future, and one in the past.
            [
                Instant::now() + Duration::from_secs(3),
                Instant::now() - Duration::from_millis(700),
            ]
        {
            // The comparison is repeated, because on a busy machine the thread may be interrupted
            // between its reads of the two clocks.
            shadowbell_testing::wait::until("clocks that agree", || {
                let read = Monotonic::read_clock().read(clock.write(moment));
                let apart = read.max(moment) - read.min(moment);
                apart < Duration::from_millis(50)
            });
        }
        assert!(Monotonic::read_clock().read(u64::MAX) >= clock.now);
        assert!(Monotonic::read_clock().read(0) <= Instant::now());
    }
}
