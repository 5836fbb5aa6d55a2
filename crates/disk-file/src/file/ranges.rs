//! Range locks on a file: they make reads and writes of its blocks atomic under concurrent
//! requests.
//!
//! A controller promises that a logical block is read and written atomically (NVM Command Set 1.1,
//! 2.1.4.2: AWUN is at least one block). A storage device guarantees that for its own blocks. The
//! page cache does not: ext4 and most other file systems take no lock to read a page that is being
//! written (XFS does), and other requests may run before a short transfer is continued. Nor does a
//! device read or write a block of several sectors atomically.
//!
//! Therefore each request that reads or writes enters its range into a list. If the range overlaps
//! that of an earlier request, and one of the two requests writes, the later request waits until
//! the earlier one has left the list. So overlapping requests of all queues run in the order of
//! their arrival. For a request without overlap, the cost is one entry in a short list.
//!
//! The position in the file selects the list. A range that spans several lists enters all of them.
//! Only one range at a time enters several lists, so the order is the same in all lists and no
//! deadlock is possible. If two ranges overlap, the later one waits in only one list, that of the
//! first byte that they share.

use super::flusher::Requester;
use crate::sys::Key;
use parking_lot::Mutex;
use shadowbell_disk::{Op, Request};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::AcqRel;

/// Number of consecutive bytes of the file (a unit) that belong to the same list. It is large, so
/// that long requests span few lists.
const UNIT: u64 = 64 << 10;
/// Number of lists. Unit n belongs to list n modulo this number.
const LISTS: u64 = 64;
/// Flag in [`Waiting::predecessors`]: the range was removed, so its request must not start any
/// more.
const REMOVED: usize = 1 << (usize::BITS - 1);

/// Range locks of a file.
pub(super) struct Ranges {
    lists: [List; LISTS as usize],
    /// Held while a range enters several lists.
    wide: Mutex<()>,
}

impl Default for Ranges {
    fn default() -> Self {
        Self { lists: std::array::from_fn(|_| List::default()), wide: Mutex::default() }
    }
}

/// Ranges in one list, the earliest first. Each list has a cache line of its own.
#[derive(Default)]
#[repr(align(64))]
struct List(Mutex<Vec<Entry>>);

#[derive(Clone)]
struct Entry {
    start: u64,
    end: u64,
    writes: bool,
    key: Key,
    of: Arc<Requester>,
    /// Wait state, if the range has to wait for earlier ones.
    waiting: Option<Arc<Waiting>>,
}

/// Wait state of a range.
struct Waiting {
    /// Number of earlier conflicting ranges that have not left yet. One more is counted until the
    /// range has entered all its lists.
    predecessors: AtomicUsize,
}

impl Waiting {
    /// Decrements the number of predecessors. Returns true if none is left.
    fn one_less(&self) -> bool {
        self.predecessors.fetch_sub(1, AcqRel) == 1
    }

    /// Marks the range as removed. Returns true if it was still waiting.
    fn mark_removed(&self) -> bool {
        self.predecessors.fetch_or(REMOVED, AcqRel) & !REMOVED != 0
    }
}

impl Entry {
    fn new(request: &Request, key: Key, of: &Arc<Requester>) -> Option<Self> {
        let writes = match request.op {
            Op::Read | Op::Compare => false,
            Op::Write { .. } | Op::WriteZeroes { .. } | Op::Discard => true,
            // The results of Flush and Verify do not depend on the data, so they need no range
            // lock.
            Op::Flush | Op::Verify => return None,
            // These operations are refused before they reach the file.
            Op::CompareAndWrite { .. } | Op::Append { .. } | Op::Zone { .. } => return None,
        };
        let (start, end) = (request.offset, request.offset.checked_add(request.len)?);
        (start < end).then(|| Self { start, end, writes, key, of: Arc::clone(of), waiting: None })
    }

    /// True if the two ranges overlap, at least one writes, and the first common byte belongs to
    /// this list.
    fn conflicts_with(&self, other: &Self, list: u64) -> bool {
        let first = self.start.max(other.start);
        first < self.end.min(other.end)
            && (self.writes || other.writes)
            && first / UNIT % LISTS == list
    }

    /// Number of the first unit of the range, and number of lists that the range spans.
    fn units(&self) -> (u64, u64) {
        let first = self.start / UNIT;
        (first, ((self.end - 1) / UNIT - first + 1).min(LISTS))
    }

    fn is(&self, key: Key, of: &Arc<Requester>) -> bool {
        self.key == key && Arc::ptr_eq(&self.of, of)
    }
}

impl Ranges {
    fn list(&self, list: u64) -> &Mutex<Vec<Entry>> {
        &self.lists[(list % LISTS) as usize].0
    }

    /// Enters the range of a request. Returns true if the request may start. Otherwise the request
    /// has to wait, and `of` receives a completion with `key` when it may start.
    pub(super) fn enter(&self, request: &Request, key: Key, of: &Arc<Requester>) -> bool {
        let Some(mut entry) = Entry::new(request, key, of) else { return true };
        let (first, count) = entry.units();
        if count == 1 {
            self.enter_list(first % LISTS, &mut entry);
        } else {
            let _one_at_a_time = self.wide.lock();
            (first..first + count).for_each(|unit| self.enter_list(unit % LISTS, &mut entry));
        }
        entry.waiting.is_none_or(|waiting| waiting.one_less())
    }

    fn enter_list(&self, list: u64, entry: &mut Entry) {
        let mut entries = self.list(list).lock();
        let predecessors = entries.iter().filter(|other| entry.conflicts_with(other, list)).count();
        if predecessors != 0 {
            let new = || Arc::new(Waiting { predecessors: AtomicUsize::new(1) });
            entry.waiting.get_or_insert_with(new).predecessors.fetch_add(predecessors, AcqRel);
        }
        entries.push(entry.clone());
    }

    /// Removes the range of a request that has ended. Returns true if the request was still
    /// waiting: `of` then never receives the completion with `key`.
    pub(super) fn leave(&self, request: &Request, key: Key, of: &Arc<Requester>) -> bool {
        let Some(entry) = Entry::new(request, key, of) else { return false };
        let (first, count) = entry.units();
        let left = (first..first + count).map(|unit| self.leave_one(unit % LISTS, key, of));
        // All units are processed, without short-circuit, because the range has to leave every
        // list.
        left.fold(false, |has_waited, waited| has_waited | waited)
    }

    fn leave_one(&self, list: u64, key: Key, of: &Arc<Requester>) -> bool {
        let mut entries = self.list(list).lock();
        let Some(at) = entries.iter().position(|entry| entry.is(key, of)) else { return false };
        let removed = entries.remove(at);
        // Only later entries can have waited for the removed one.
        for later in entries.iter().skip(at).filter(|later| later.conflicts_with(&removed, list)) {
            if later.waiting.as_ref().is_some_and(|waiting| waiting.one_less()) {
                later.of.complete(later.key, 0);
            }
        }
        removed.waiting.is_some_and(|waiting| waiting.mark_removed())
    }

    /// Removes all requests of a dropped queue.
    fn leave_all(&self, of: &Arc<Requester>) {
        for list in 0..LISTS {
            let theirs: Vec<_> = {
                let entries = self.list(list).lock();
                let theirs = entries.iter().filter(|entry| Arc::ptr_eq(&entry.of, of));
                theirs.map(|entry| entry.key).collect()
            };
            for key in theirs {
                self.leave_one(list, key, of);
            }
        }
    }
}

impl std::fmt::Debug for Ranges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Ranges")
    }
}

/// Range locks of a file, for the use of one queue. Dropping this value removes all ranges that the
/// queue has entered.
pub(super) struct Entered {
    ranges: Option<Arc<Ranges>>,
    of: Arc<Requester>,
}

impl Entered {
    /// Creates the access of a queue to the range locks. `ranges` is `None` if the file reads and
    /// writes blocks atomically without locks.
    pub(super) fn new(ranges: Option<Arc<Ranges>>, of: &Arc<Requester>) -> Self {
        Self { ranges, of: Arc::clone(of) }
    }

    /// Enters the range of a request, see [`Ranges::enter`].
    pub(super) fn enter(&self, request: &Request, key: Key) -> bool {
        self.ranges.as_ref().is_none_or(|ranges| ranges.enter(request, key, &self.of))
    }

    /// Removes the range of a request that has ended, see [`Ranges::leave`].
    pub(super) fn leave(&self, request: &Request, key: Key) -> bool {
        self.ranges.as_ref().is_some_and(|ranges| ranges.leave(request, key, &self.of))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(ranges) = &self.ranges {
            ranges.leave_all(&self.of);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Receiver of completions, in place of a disk queue.
    struct Queue(Arc<Requester>);

    impl Queue {
        fn new() -> Self {
            Self(Requester::new(crate::sys::Waker::none()))
        }

        /// Keys of the requests that were allowed to start since the last call.
        fn take_completed(&self) -> Vec<Key> {
            let mut take_completed = Vec::new();
            self.0.take(&mut take_completed);
            take_completed.into_iter().map(|(key, _)| key).collect()
        }
    }

    const READ: Op = Op::Read;
    const WRITE: Op = Op::Write { fua: false };

    fn request(op: Op, offset: u64, len: u64) -> Request {
        Request { op, offset, len }
    }

    #[test]
    fn overlapping_requests_wait_in_order_unless_both_read() {
        let (ranges, a, b) = (Ranges::default(), Queue::new(), Queue::new());
        let keys: Vec<_> = (0..6).map(|index| Key::of(index, 0)).collect();
        let whole = request(READ, 0, 4096);
        assert!(ranges.enter(&whole, keys[0], &a.0));
        assert!(ranges.enter(&request(READ, 512, 512), keys[1], &b.0), "both read");
        assert!(ranges.enter(&request(WRITE, 4096, 512), keys[2], &b.0), "behind it");
        let write = request(WRITE, 512, 1024);
        assert!(!ranges.enter(&write, keys[3], &b.0));
        assert!(!ranges.enter(&request(READ, 1024, 512), keys[4], &a.0), "not before the write");
        assert!(ranges.enter(&request(READ, 1536, 512), keys[5], &a.0));
        assert!(!ranges.leave(&whole, keys[0], &a.0));
        assert_eq!(b.take_completed(), [], "there is another one");
        assert!(!ranges.leave(&request(READ, 512, 512), keys[1], &b.0));
        assert_eq!((b.take_completed(), a.take_completed()), (vec![keys[3]], vec![]));
        assert!(!ranges.leave(&write, keys[3], &b.0));
        assert_eq!((b.take_completed(), a.take_completed()), (vec![], vec![keys[4]]));
    }

    #[test]
    fn a_cancelled_waiter_is_not_notified_and_unblocks_others() {
        let (ranges, a) = (Ranges::default(), Queue::new());
        let keys: Vec<_> = (0..3).map(|index| Key::of(index, 0)).collect();
        let long = request(WRITE, 0, 4 * UNIT);
        assert!(ranges.enter(&request(READ, UNIT, 512), keys[0], &a.0));
        assert!(!ranges.enter(&long, keys[1], &a.0));
        assert!(!ranges.enter(&request(READ, 3 * UNIT, 512), keys[2], &a.0));
        assert!(ranges.leave(&long, keys[1], &a.0), "it has waited");
        assert_eq!(a.take_completed(), [keys[2]]);
        assert!(!ranges.leave(&request(READ, UNIT, 512), keys[0], &a.0));
        assert_eq!(a.take_completed(), []);
    }

    #[test]
    fn a_dropped_queue_releases_its_ranges() {
        let (ranges, a, b) = (Arc::new(Ranges::default()), Queue::new(), Queue::new());
        let keys: Vec<_> = (0..2).map(|index| Key::of(index, 0)).collect();
        let entered = Entered::new(Some(Arc::clone(&ranges)), &a.0);
        assert!(entered.enter(&request(WRITE, 0, 100 * UNIT), keys[0]));
        assert!(!ranges.enter(&request(READ, 99 * UNIT, 512), keys[1], &b.0));
        drop(entered);
        assert_eq!(b.take_completed(), [keys[1]]);
        ranges.leave(&request(READ, 99 * UNIT, 512), keys[1], &b.0);
        assert!(ranges.lists.iter().all(|list| list.0.lock().is_empty()));
    }

    proptest! {
        /// Two properties, for any sequence of requests. Running requests do not overlap unless
        /// both read. After all running requests have left, a waiting request may start.
        #[test]
        fn conflicting_requests_never_overlap_and_all_waiters_start(
            steps in prop::collection::vec(
                (any::<bool>(), 0..80u64, 1..80u64, 0..16usize, any::<bool>()), 1..200),
        ) {
            let (ranges, queue) = (Ranges::default(), Queue::new());
            // Requests in order of arrival: key, request, and true if it may run.
            let mut model: Vec<(Key, Request, bool)> = Vec::new();
            let overlap = |a: &Request, b: &Request| {
                (a.op == WRITE || b.op == WRITE)
                    && a.offset.max(b.offset) < (a.offset + a.len).min(b.offset + b.len)
            };
            let mut next = 0;
            for (writes, start, len, which, comes) in steps {
                if comes || model.is_empty() {
                    let op = if writes { WRITE } else { READ };
                    // Most requests span one or two lists, and some span all.
                    let request = request(op, start * UNIT / 4, len * UNIT / 4);
                    let key = Key::of(next, 0);
                    next += 1;
                    let is_free = model.iter().all(|(_, other, _)| !overlap(other, &request));
                    prop_assert_eq!(ranges.enter(&request, key, &queue.0), is_free);
                    model.push((key, request, is_free));
                } else {
                    let (key, request, has_turn) = model.remove(which % model.len());
                    prop_assert_eq!(ranges.leave(&request, key, &queue.0), !has_turn);
                }
                let mut take_completed = queue.take_completed();
                for at in 0..model.len() {
                    let (key, request, has_turn) = model[at];
                    let is_free = model[..at].iter().all(|(_, other, _)| !overlap(other, &request));
                    if is_free && !has_turn {
                        let answer = take_completed.iter().position(|answer| *answer == key);
                        prop_assert!(answer.is_some(), "it waits without a predecessor");
                        take_completed.remove(answer.unwrap_or_default());
                        model[at].2 = true;
                    }
                }
                prop_assert!(take_completed.is_empty());
            }
        }
    }
}
