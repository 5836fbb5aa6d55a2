//! Block locks, which keep the data and metadata of a block consistent.

use parking_lot::Mutex;
use shadowbell_disk::CompletionQueue;
use std::ops::Range;
use std::sync::Arc;

/// Wake-up of a queue, with the serial numbers of its waiting requests that may continue.
pub(crate) type Bell = CompletionQueue<u64>;

/// Returns and removes the serial numbers of requests that may continue.
pub(crate) fn granted(bell: &Bell) -> Vec<u64> {
    let mut granted = Vec::new();
    bell.take(&mut granted);
    granted
}

/// Logical blocks that a request reads or writes, for the block locks.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    pub(super) blocks: Range<u64>,
    /// `blocks`, and the blocks whose metadata are in the same blocks of the disk below. Two writes
    /// exclude each other if these ranges overlap.
    pub(super) around: Range<u64>,
    pub(super) writes: bool,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Claim {
    fn overlaps(&self, other: &Self) -> bool {
        match (self.writes, other.writes) {
            (false, false) => false,
            (true, true) => overlap(&self.around, &other.around),
            _ => overlap(&self.blocks, &other.blocks),
        }
    }
}

#[derive(Debug)]
struct Entry {
    claim: Claim,
    serial: u64,
    of: Arc<Bell>,
    /// Number of earlier requests for which this request waits.
    predecessors: usize,
}

/// Block locks of a disk, shared by all of its queues. Requests get their locks in order of
/// arrival.
#[derive(Debug, Default)]
pub(super) struct Locks {
    list: Mutex<Vec<Entry>>,
}

impl Locks {
    /// Adds a request, identified by a serial number that the queue never uses again. Returns false
    /// if the request has to wait. The [`Bell`] of its queue then notifies the queue when the
    /// request may start.
    pub(super) fn enter(&self, claim: Claim, serial: u64, of: &Arc<Bell>) -> bool {
        let mut list = self.list.lock();
        let predecessors = list.iter().filter(|entry| entry.claim.overlaps(&claim)).count();
        list.push(Entry { claim, serial, of: Arc::clone(of), predecessors });
        predecessors == 0
    }

    /// Removes a request that has ended or was cancelled.
    pub(super) fn leave(&self, serial: u64, of: &Arc<Bell>) {
        let mut list = self.list.lock();
        let is_it = |entry: &Entry| entry.serial == serial && Arc::ptr_eq(&entry.of, of);
        if let Some(at) = list.iter().position(is_it) {
            let removed = list.remove(at);
            // Only later entries can have waited for the removed one.
            for later in
                list.iter_mut().skip(at).filter(|later| later.claim.overlaps(&removed.claim))
            {
                later.predecessors -= 1;
                if later.predecessors == 0 {
                    later.of.push(later.serial);
                }
            }
        }
    }

    /// Claims of all writes of a queue that are running or waiting.
    pub(super) fn writes_of(&self, of: &Arc<Bell>) -> Vec<Claim> {
        let list = self.list.lock();
        let theirs = list.iter().filter(|entry| Arc::ptr_eq(&entry.of, of) && entry.claim.writes);
        theirs.map(|entry| entry.claim.clone()).collect()
    }

    /// Removes all requests of a dropped queue.
    pub(super) fn leave_all(&self, of: &Arc<Bell>) {
        let theirs: Vec<u64> = {
            let list = self.list.lock();
            let theirs = list.iter().filter(|entry| Arc::ptr_eq(&entry.of, of));
            theirs.map(|entry| entry.serial).collect()
        };
        theirs.into_iter().for_each(|serial| self.leave(serial, of));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(blocks: Range<u64>, writes: bool) -> Claim {
        let around = blocks.start / 8 * 8..blocks.end.div_ceil(8) * 8;
        Claim { blocks, around, writes }
    }

    #[test]
    fn conflicting_claims_wait_in_order() {
        let (locks, one, two) = (Locks::default(), Bell::new().unwrap(), Bell::new().unwrap());
        let (one, two) = (Arc::new(one), Arc::new(two));
        assert!(locks.enter(claim(0..4, true), 1, &one));
        assert!(locks.enter(claim(4..8, false), 2, &one), "its metadata alone are near");
        assert!(!locks.enter(claim(3..5, false), 1, &two));
        assert!(!locks.enter(claim(4..8, true), 2, &two), "as are those that it writes");
        assert!(locks.enter(claim(8..9, true), 3, &two));
        assert!(granted(&two).is_empty());
        locks.leave(1, &one);
        assert_eq!(granted(&two), [1]);
        locks.leave(2, &one);
        assert!(granted(&two).is_empty(), "it waits for a reader, too");
        locks.leave(1, &two);
        assert_eq!(granted(&two), [2]);
        locks.leave_all(&two);
        assert!(locks.list.lock().is_empty() && granted(&one).is_empty());
    }
}
