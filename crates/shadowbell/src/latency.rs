//! Latencies: how they are collected, and the figures that they come to.

use anyhow::Context;
use hdrhistogram::Histogram;
use serde::Serialize;

/// The longest latency that differs from longer ones in a histogram, in nanoseconds.
const LONGEST: u64 = 60_000_000_000;

/// A distribution of latencies, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// The mean.
    pub mean: f64,
    /// The median.
    pub p50: u64,
    /// 99 of 100 are not above it.
    pub p99: u64,
    /// 999 of 1000 are not above it.
    pub p999: u64,
    /// The largest.
    pub max: u64,
    /// How many I/Os were timed.
    pub samples: u64,
}

impl Latency {
    /// The figures of a histogram in nanoseconds; nothing of an empty one.
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

/// An empty histogram of nanoseconds, to three digits.
pub(crate) fn histogram() -> anyhow::Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, LONGEST, 3).context("no histogram of the latencies")
}
