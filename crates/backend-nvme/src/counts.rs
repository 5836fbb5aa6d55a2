//! Which way the data went: how many commands moved them where they are, and how many through a
//! buffer of ours.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What one queue has counted. Written by its thread alone, which puts its sums there once for each
/// batch; on cache lines of its own, so that nobody else's counting makes it wait.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Counts {
    in_place: AtomicU64,
    copied: AtomicU64,
}

impl Counts {
    pub(crate) fn put(&self, ways: Ways) {
        self.in_place.store(ways.in_place, Ordering::Relaxed);
        self.copied.store(ways.copied, Ordering::Relaxed);
    }

    fn get(&self) -> Ways {
        Ways {
            in_place: self.in_place.load(Ordering::Relaxed),
            copied: self.copied.load(Ordering::Relaxed),
        }
    }
}

/// Commands that moved data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ways {
    /// From or to the guest's memory, by the SSD itself.
    pub(crate) in_place: u64,
    /// Through a buffer, from which somebody copied.
    pub(crate) copied: u64,
}

impl Ways {
    fn add(&mut self, other: Self) {
        self.in_place += other.in_place;
        self.copied += other.copied;
    }
}

/// What all queues of a disk have counted, those that are gone included.
#[derive(Debug, Default)]
pub(crate) struct Totals(Mutex<(Ways, Vec<Arc<Counts>>)>);

impl Totals {
    /// The place of a new queue.
    pub(crate) fn join(&self) -> Arc<Counts> {
        let counts = Arc::new(Counts::default());
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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

    pub(crate) fn sum(&self) -> Ways {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut sum, there) = (all.0, &all.1);
        there.iter().for_each(|counts| sum.add(counts.get()));
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_that_are_gone_still_count() {
        let totals = Totals::default();
        let ways = |in_place, copied| Ways { in_place, copied };
        let one = totals.join();
        one.put(ways(5, 1));
        drop(one);
        assert_eq!(totals.sum(), ways(5, 1));
        let other = totals.join();
        other.put(ways(1, 0));
        other.put(ways(2, 0));
        assert_eq!(totals.sum(), ways(7, 1));
        assert_eq!(totals.0.lock().unwrap().1.len(), 1, "a place that nobody has is given up");
    }
}
