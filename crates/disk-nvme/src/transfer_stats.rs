//! Counters of transfers: commands with zero-copy, and commands that copy through a buffer.

use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Published counters of one queue. Only the queue's thread stores them, once per batch. They have
/// cache lines of their own, to avoid false sharing with other queues.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct QueueTransferStats {
    in_place: AtomicU64,
    copied: AtomicU64,
}

impl QueueTransferStats {
    pub(crate) fn publish(&self, transfers: TransferStats) {
        self.in_place.store(transfers.in_place, Ordering::Relaxed);
        self.copied.store(transfers.copied, Ordering::Relaxed);
    }

    fn get(&self) -> TransferStats {
        TransferStats {
            in_place: self.in_place.load(Ordering::Relaxed),
            copied: self.copied.load(Ordering::Relaxed),
        }
    }
}

/// Counts of commands that transferred data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TransferStats {
    /// Zero-copy commands: direct access of the SSD to guest memory.
    pub(crate) in_place: u64,
    /// Commands with a copy through a buffer.
    pub(crate) copied: u64,
}

impl TransferStats {
    fn add(&mut self, other: Self) {
        self.in_place += other.in_place;
        self.copied += other.copied;
    }
}

/// Counters of all queues of a disk, including queues that were dropped.
#[derive(Debug, Default)]
pub(crate) struct DiskTransferStats(Mutex<(TransferStats, Vec<Arc<QueueTransferStats>>)>);

impl DiskTransferStats {
    /// Creates the counters of a new queue.
    pub(crate) fn join(&self) -> Arc<QueueTransferStats> {
        let counts = Arc::new(QueueTransferStats::default());
        let mut all = self.0.lock();
        let (past, there) = &mut *all;
        there.retain(|counts| {
            let is_used = Arc::strong_count(counts) > 1;
            if !is_used {
                past.add(counts.get());
            }
            is_used
        });
        there.push(Arc::clone(&counts));
        counts
    }

    pub(crate) fn sum(&self) -> TransferStats {
        let all = self.0.lock();
        let (mut sum, there) = (all.0, &all.1);
        there.iter().for_each(|counts| sum.add(counts.get()));
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_queues_remain_in_the_totals() {
        let totals = DiskTransferStats::default();
        let transfers = |in_place, copied| TransferStats { in_place, copied };
        let one = totals.join();
        one.publish(transfers(5, 1));
        drop(one);
        assert_eq!(totals.sum(), transfers(5, 1));
        let other = totals.join();
        other.publish(transfers(1, 0));
        other.publish(transfers(2, 0));
        assert_eq!(totals.sum(), transfers(7, 1));
        assert_eq!(totals.0.lock().1.len(), 1, "the counters of a queue that is gone are dropped");
    }
}
