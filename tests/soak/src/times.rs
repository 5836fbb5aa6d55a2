//! Distribution of durations.

use std::time::Duration;

/// Measured durations.
#[derive(Debug, Default, Clone)]
pub(crate) struct Times(Vec<Duration>);

impl Times {
    pub(crate) fn of(times: impl Iterator<Item = Duration>) -> Self {
        Self(times.collect())
    }

    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    pub(crate) fn append(&mut self, others: &Self) {
        self.0.extend_from_slice(&others.0);
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }

    /// Quantile `share` of the durations.
    pub(crate) fn at(&self, share: f64) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let nth = (sorted.len() as f64 * share).ceil() as usize;
        sorted.get(nth.saturating_sub(1)).copied().unwrap_or_default()
    }

    /// p50, p99 and maximum in milliseconds, as cells of a table.
    pub(crate) fn cells(&self) -> Vec<String> {
        [0.5, 0.99, 1.0].map(|share| format!("{:.1}", millis(self.at(share)))).to_vec()
    }
}

pub(crate) fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_bounds_its_share_of_the_times() {
        let mut times = Times::default();
        assert_eq!(times.at(0.5), Duration::ZERO);
        (1..=100).rev().for_each(|n| times.push(Duration::from_millis(n)));
        assert_eq!(times.cells(), ["50.0", "99.0", "100.0"]);
        assert_eq!(times.count(), 100);
    }
}
