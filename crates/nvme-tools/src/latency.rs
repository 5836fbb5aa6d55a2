//! Latency histograms and their summaries.

use anyhow::Context;
use hdrhistogram::Histogram;
use serde::Serialize;

/// Largest latency that a histogram records, in nanoseconds. A longer one is recorded as this.
const MAX_LATENCY: u64 = 60_000_000_000;

/// Summary of latencies, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// Maximum.
    pub max: u64,
    /// Number of measured I/Os.
    pub samples: u64,
}

impl Latency {
    /// Summary of a histogram in nanoseconds; `None` if it is empty.
    pub fn of(latencies: &Histogram<u64>) -> Option<Self> {
        (!latencies.is_empty()).then(|| Self {
            mean: latencies.mean(),
            p50: latencies.value_at_quantile(0.5),
            p99: latencies.value_at_quantile(0.99),
            p999: latencies.value_at_quantile(0.999),
            max: latencies.max(),
            samples: latencies.len(),
        })
    }
}

/// Empty histogram of nanoseconds with three significant digits.
pub(crate) fn histogram() -> anyhow::Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, MAX_LATENCY, 3).context("no histogram of the latencies")
}
