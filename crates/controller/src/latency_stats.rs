//! Latency histograms and command counts by namespace and kind of command. They are counted only
//! while [`Pool::measure`](crate::Pool::measure) is on.
//!
//! A histogram covers one microsecond to 17 seconds, with eight buckets of equal width per power of
//! two. So the relative error is at most an eighth, and finding a bucket takes a few instructions.
//! Each set of counters has one writing thread and any number of reading threads.

use serde::{Deserialize, Serialize};
use shadowbell_doorbell::Counter;

/// Base-2 logarithm of the number of buckets per power of two.
const SUB_BUCKET_BITS: u32 = 3;
/// Base-2 logarithm of the histogram's lower end in nanoseconds. Shorter times are counted in the
/// first bucket.
const SHORTEST: u32 = 10;
/// Base-2 logarithm of the histogram's upper end in nanoseconds. Longer times are counted in the
/// last bucket.
const LONGEST: u32 = 34;
/// Number of buckets of a histogram.
pub const BUCKETS: usize = ((LONGEST - SHORTEST) << SUB_BUCKET_BITS) as usize;

/// Kind of a command in the statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CommandKind {
    /// Read and Compare.
    Read,
    Write,
    Other,
}

/// Bucket of a duration in nanoseconds.
fn bucket_of(ns: u64) -> usize {
    let ns = ns.clamp(1 << SHORTEST, (1 << LONGEST) - 1);
    let doubling = ns.ilog2();
    let fine = (ns >> (doubling - SUB_BUCKET_BITS)) as usize & ((1 << SUB_BUCKET_BITS) - 1);
    (((doubling - SHORTEST) as usize) << SUB_BUCKET_BITS) + fine
}

/// Exclusive upper end of `bucket` in nanoseconds. The last bucket also holds longer times.
#[must_use]
pub fn bucket_end(bucket: usize) -> u64 {
    let bucket = bucket.min(BUCKETS - 1);
    let doubling = SHORTEST + (bucket >> SUB_BUCKET_BITS) as u32;
    let fine = (bucket & ((1 << SUB_BUCKET_BITS) - 1)) as u64;
    ((1 << SUB_BUCKET_BITS) + fine + 1) << (doubling - SUB_BUCKET_BITS)
}

/// Counters of one namespace, written by one thread.
#[derive(Debug, Default)]
pub(crate) struct LatencyCounters {
    reads: KindCounters,
    writes: KindCounters,
    others: KindCounters,
}

#[derive(Debug)]
struct KindCounters {
    errors: Counter,
    blocks: Counter,
    total_ns: Counter,
    buckets: [Counter; BUCKETS],
}

impl Default for KindCounters {
    fn default() -> Self {
        Self {
            errors: Counter::default(),
            blocks: Counter::default(),
            total_ns: Counter::default(),
            buckets: std::array::from_fn(|_| Counter::default()),
        }
    }
}

impl LatencyCounters {
    /// Counts a command that ended after `ns` nanoseconds. Only one thread may call this.
    pub(crate) fn count(&self, kind: CommandKind, blocks: u32, is_error: bool, ns: u64) {
        let kind = match kind {
            CommandKind::Read => &self.reads,
            CommandKind::Write => &self.writes,
            CommandKind::Other => &self.others,
        };
        if is_error {
            kind.errors.add(1);
        } else {
            kind.blocks.add(blocks.into());
        }
        kind.total_ns.add(ns);
        if let Some(bucket) = kind.buckets.get(bucket_of(ns)) {
            bucket.add(1);
        }
    }

    /// Adds the counters to `sum`.
    pub(crate) fn add_to(&self, sum: &mut NamespaceLatency) {
        self.reads.add_to(&mut sum.reads);
        self.writes.add_to(&mut sum.writes);
        self.others.add_to(&mut sum.others);
    }
}

impl KindCounters {
    fn add_to(&self, sum: &mut KindLatency) {
        sum.errors += self.errors.get();
        sum.blocks += self.blocks.get();
        sum.latency.total_ns = sum.latency.total_ns.wrapping_add(self.total_ns.get());
        sum.latency.counts.resize(BUCKETS, 0);
        for (sum, bucket) in sum.latency.counts.iter_mut().zip(&self.buckets) {
            *sum += bucket.get();
        }
    }
}

/// Measured latencies of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceLatency {
    /// NSID.
    pub nsid: u32,
    /// Read and Compare.
    pub reads: KindLatency,
    /// Write.
    pub writes: KindLatency,
    /// All other commands, whose blocks are not counted.
    pub others: KindLatency,
}

/// Measured latencies of one kind of command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindLatency {
    /// Commands that ended in an error.
    pub errors: u64,
    /// Logical blocks of the commands that succeeded.
    pub blocks: u64,
    /// Latencies of all commands: from the time when the controller found the command in the queue
    /// until it posted the completion.
    pub latency: Distribution,
}

/// Latency histogram.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Distribution {
    /// Sum of all latencies in nanoseconds.
    pub total_ns: u64,
    /// Counts by bucket. There are [`BUCKETS`] of them, or none if nothing was counted.
    /// [`bucket_end`] returns the upper end of a bucket.
    pub counts: Vec<u64>,
}

impl Distribution {
    /// Number of commands.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// Difference to an earlier histogram of the same counters.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let before_at = |bucket| before.counts.get(bucket).copied().unwrap_or(0);
        let counts = self.counts.iter().enumerate();
        Self {
            total_ns: self.total_ns.saturating_sub(before.total_ns),
            counts: counts.map(|(at, count)| count.saturating_sub(before_at(at))).collect(),
        }
    }

    /// Adds another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.total_ns = self.total_ns.saturating_add(other.total_ns);
        self.counts.resize(self.counts.len().max(other.counts.len()), 0);
        for (sum, count) in self.counts.iter_mut().zip(&other.counts) {
            *sum = sum.saturating_add(*count);
        }
    }

    /// Quantile of the latencies in nanoseconds, rounded up by at most an eighth. `part` is between
    /// 0 and 1. `None` if the histogram is empty.
    #[must_use]
    pub fn quantile(&self, part: f64) -> Option<u64> {
        let count = self.count();
        let rank = ((count as f64 * part).ceil() as u64).clamp(1, count.max(1));
        let mut below = 0_u64;
        let mut buckets = self.counts.iter().enumerate();
        let found = buckets.find(|(_, count)| {
            below = below.saturating_add(**count);
            below >= rank
        });
        found.map(|(bucket, _)| bucket_end(bucket))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latency_bucket_is_an_eighth_wide() {
        assert_eq!((bucket_of(0), bucket_of(1023), bucket_of(1024)), (0, 0, 0));
        assert_eq!((bucket_of(1151), bucket_of(1152), bucket_of(2048)), (0, 1, 8));
        assert_eq!((bucket_of(u64::MAX), bucket_of(1 << 34)), (BUCKETS - 1, BUCKETS - 1));
        for ns in (0..40).flat_map(|power| [1_u64 << power, (1 << power) + (1 << power) / 3]) {
            let bucket = bucket_of(ns);
            if (1 << SHORTEST..1 << LONGEST).contains(&ns) {
                let end = bucket_end(bucket);
                assert!(ns < end && end - ns <= ns / 8 + 1, "{ns} {end}");
                assert!(bucket == 0 || bucket_end(bucket - 1) <= ns, "{ns}");
            }
        }
        assert!((1..BUCKETS).all(|bucket| bucket_end(bucket - 1) < bucket_end(bucket)));
        assert_eq!(bucket_end(BUCKETS), 1 << LONGEST);
    }

    #[test]
    fn latency_counters_are_read_as_counted() {
        let counters = LatencyCounters::default();
        (0..99).for_each(|_| counters.count(CommandKind::Read, 8, false, 10_000));
        counters.count(CommandKind::Read, 8, true, 1_000_000);
        counters.count(CommandKind::Other, 0, false, 5);
        let mut sum = NamespaceLatency::default();
        counters.add_to(&mut sum);
        let NamespaceLatency { reads, writes, others, .. } = &sum;
        assert_eq!((reads.latency.count(), reads.errors, reads.blocks), (100, 1, 99 * 8));
        assert_eq!(reads.latency.total_ns, 99 * 10_000 + 1_000_000);
        assert_eq!((writes.latency.count(), writes.latency.quantile(0.5)), (0, None));
        assert_eq!((others.latency.count(), others.latency.quantile(1.0)), (1, Some(1152)));
        let of = |part| reads.latency.quantile(part).unwrap();
        assert!((10_000..11_300).contains(&of(0.0)) && of(0.0) == of(0.99), "{}", of(0.99));
        assert!((1_000_000..1_130_000).contains(&of(0.999)), "{}", of(0.999));
        // Difference to an earlier histogram.
        let before = sum.clone();
        counters.count(CommandKind::Read, 8, false, 20_000);
        let mut sum = NamespaceLatency::default();
        counters.add_to(&mut sum);
        let since = sum.reads.latency.since(&before.reads.latency);
        assert_eq!((since.count(), since.total_ns), (1, 20_000));
        assert!((20_000..22_600).contains(&since.quantile(0.5).unwrap()));
        let mut both = before.reads.latency.clone();
        both.merge(&since);
        assert_eq!(both, sum.reads.latency);
        assert_eq!(Distribution::default().quantile(0.5), None);
    }
}
