//! Start times of a job's I/Os at a fixed rate, independent of completions.

/// Fixed rate of I/Os at equal intervals. Times are nanoseconds since an epoch of the caller.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    rate: u64,
    /// Start time of the next I/O; `None` before the first.
    due: Option<u64>,
    /// Rounding error of `due`, in nanoseconds times the rate.
    rest: u64,
}

/// Nanoseconds per second.
const SECOND: u64 = 1_000_000_000;

impl Pace {
    /// Pace of `rate` I/Os per second, from 1 to a billion.
    pub(super) fn new(rate: u64) -> Self {
        Self { rate: rate.clamp(1, SECOND), due: None, rest: 0 }
    }

    /// Start time of the next I/O. The first one is due `now`.
    #[inline]
    pub(super) fn due(&mut self, now: u64) -> u64 {
        *self.due.get_or_insert(now)
    }

    /// Sets the start time of the next I/O, which does not depend on a delay of the one before.
    #[inline]
    pub(super) fn advance(&mut self) {
        let Some(due) = &mut self.due else { return };
        *due = due.saturating_add(SECOND / self.rate);
        self.rest += SECOND % self.rate;
        if self.rest >= self.rate {
            self.rest -= self.rate;
            *due = due.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_the_requested_number_of_ios() {
        for rate in [1, 3, 7, 30_000, 333_333, 999_999_999, 1_000_000_000] {
            let mut pace = Pace::new(rate);
            let first = pace.due(17);
            let steps = rate.min(2_000_000);
            for _ in 0..steps {
                pace.advance();
            }
            let expected = u128::from(steps) * u128::from(SECOND) / u128::from(rate);
            assert_eq!(u128::from(pace.due(0) - first), expected, "{rate}");
        }
    }

    #[test]
    fn a_late_io_does_not_delay_the_next() {
        let mut pace = Pace::new(1000);
        assert_eq!(pace.due(5), 5);
        assert_eq!(pace.due(900), 5);
        pace.advance();
        assert_eq!(pace.due(90_000_000), 1_000_005);
    }
}
