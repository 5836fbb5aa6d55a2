//! Locks on ranges of clusters of the disk.
//!
//! A request on the slow path holds the lock of its clusters: shared to read, exclusively to change
//! them. So a cluster does not get another location in the file while a request uses it.

use parking_lot::{Condvar, Mutex};
use std::ops::Range;

#[derive(Default)]
pub(crate) struct RangeLocks {
    held: Mutex<Vec<(Range<u64>, bool)>>,
    released: Condvar,
}

/// Lock of a range. Dropping it releases the lock.
pub(crate) struct RangeLock<'a> {
    locks: &'a RangeLocks,
    range: Range<u64>,
    is_exclusive: bool,
}

impl RangeLocks {
    /// Waits for the lock of a range.
    pub(crate) fn lock(&self, range: Range<u64>, is_exclusive: bool) -> RangeLock<'_> {
        let mut held = self.held.lock();
        let excludes = |(other, exclusive): &(Range<u64>, bool)| {
            (is_exclusive || *exclusive) && other.start < range.end && range.start < other.end
        };
        while held.iter().any(excludes) {
            self.released.wait(&mut held);
        }
        held.push((range.clone(), is_exclusive));
        RangeLock { locks: self, range, is_exclusive }
    }
}

impl Drop for RangeLock<'_> {
    fn drop(&mut self) {
        let mut held = self.locks.held.lock();
        let this = (self.range.clone(), self.is_exclusive);
        if let Some(at) = held.iter().position(|other| *other == this) {
            held.swap_remove(at);
        }
        drop(held);
        self.locks.released.notify_all();
    }
}
