//! Orphans: writes in flight at the storage whose submitter has released them.
//!
//! Storage may hang. A disk that sends its requests over a transport of its own can release a write
//! in flight at once when the write is [cancelled](crate::Queue::cancel): the data were copied, so
//! no memory of the submitter is accessed later. But the storage may still execute the write. So
//! the write remains as an orphan until the storage has answered. Until then, later requests that
//! overlap it wait, and every flush waits.
//!
//! The list belongs to the disk and not to a queue, because the later requests may come from any
//! queue, even of another controller. While there are no orphans, the cost is one load per request.

use crate::request::{Op, Request};
use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;

/// Maximum number of orphans of a disk. At the maximum, a further cancelled write stays with its
/// submitter. An NBD disk with four connections never has more requests in flight than this.
const MAX: usize = 1024;

/// Byte range of an orphan.
#[derive(Debug)]
struct Range {
    number: u64,
    start: u64,
    end: u64,
}

#[derive(Default)]
struct State {
    ranges: Vec<Range>,
    next: u64,
    /// Queues with requests that wait for an orphan.
    waiting: Vec<Waker>,
}

/// List of the orphans of a disk. All queues of the disk share it.
#[derive(Default)]
pub struct Orphans {
    count: AtomicUsize,
    /// Number of orphans that have ended so far.
    ended: AtomicU64,
    state: Mutex<State>,
}

impl Orphans {
    /// Number of orphans.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// True if there is no orphan.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of orphans that have ended so far. If it has changed, the caller should call
    /// [`blocks`](Self::blocks) again for requests that had to wait.
    pub fn ended(&self) -> u64 {
        self.ended.load(Ordering::Acquire)
    }

    /// Adds an orphan with the range of a write in flight. The orphan ends when the returned value
    /// is dropped. `None` if the list is full: then the submitter has to wait for the write.
    pub fn adopt(self: &Arc<Self>, offset: u64, len: u64) -> Option<Orphan> {
        let mut state = self.state.lock();
        if state.ranges.len() >= MAX {
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.ranges.push(Range { number, start: offset, end: offset.saturating_add(len) });
        self.count.store(state.ranges.len(), Ordering::Release);
        Some(Orphan { orphans: Arc::clone(self), number })
    }

    /// True if a request has to wait for an orphan. In that case, `waker` is called when any orphan
    /// has ended, and the caller then has to call this function again.
    #[inline]
    pub fn blocks(&self, request: &Request, waker: &Waker) -> bool {
        !self.is_empty() && self.overlaps(request, waker)
    }

    #[cold]
    fn overlaps(&self, request: &Request, waker: &Waker) -> bool {
        let mut state = self.state.lock();
        let end = request.offset.saturating_add(request.len);
        let overlaps = |range: &Range| request.offset < range.end && range.start < end;
        let is_blocked = match request.op {
            Op::Flush => !state.ranges.is_empty(),
            _ => state.ranges.iter().any(overlaps),
        };
        if is_blocked && !state.waiting.iter().any(|other| other.will_wake(waker)) {
            state.waiting.push(waker.clone());
        }
        is_blocked
    }

    fn remove(&self, number: u64) {
        let mut state = self.state.lock();
        state.ranges.retain(|range| range.number != number);
        self.count.store(state.ranges.len(), Ordering::Release);
        self.ended.fetch_add(1, Ordering::AcqRel);
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl fmt::Debug for Orphans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.state.lock().ranges).finish()
    }
}

/// Registration of an orphan. It is dropped when the storage has answered the write.
#[derive(Debug)]
#[must_use = "an orphan ends when this value is dropped"]
pub struct Orphan {
    orphans: Arc<Orphans>,
    number: u64,
}

impl Drop for Orphan {
    fn drop(&mut self) {
        self.orphans.remove(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicU32);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn request(op: Op, offset: u64, len: u64) -> Request {
        Request { op, offset, len }
    }

    #[test]
    fn overlapping_requests_and_flushes_wait_until_orphans_have_ended() {
        let orphans = Arc::new(Orphans::default());
        let count = Arc::new(Count::default());
        let waker = Waker::from(Arc::clone(&count));
        let blocks = |op, offset, len| orphans.blocks(&request(op, offset, len), &waker);
        assert!(!blocks(Op::Flush, 0, 0));
        let first = orphans.adopt(4096, 4096).unwrap();
        let second = orphans.adopt(u64::MAX - 1, 4096).unwrap();
        assert_eq!(orphans.len(), 2);
        assert!(!blocks(Op::Read, 0, 4096) && !blocks(Op::Read, 8192, 4096));
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        assert!(blocks(Op::Read, 0, 4097) && blocks(Op::Discard, 8191, 1));
        assert!(blocks(Op::Flush, 0, 0) && blocks(Op::Read, u64::MAX - 1, 1));
        drop(first);
        // The queue is woken once for all of its requests.
        assert_eq!((orphans.ended(), count.0.load(Ordering::Relaxed)), (1, 1));
        assert!(!blocks(Op::Read, 0, 8192) && blocks(Op::Flush, 0, 0));
        drop(second);
        assert_eq!((orphans.ended(), count.0.load(Ordering::Relaxed)), (2, 2));
        assert!(!blocks(Op::Flush, 0, 0) && orphans.is_empty());
    }

    /// Every pair of orphans with at most three bytes in a disk of six, every order of their ends,
    /// and every request: a request waits exactly while an orphan overlaps it, and a flush while
    /// there is any.
    #[test]
    fn requests_wait_exactly_for_the_orphans_that_they_overlap() {
        let ranges = || (0..6_u64).flat_map(|at| (1..=3).map(move |len| (at, len)));
        let overlap = |(at, len): (u64, u64), (other, its): (u64, u64)| {
            (at..at + len).any(|byte| (other..other + its).contains(&byte))
        };
        let waker = Waker::noop();
        let mut checked = 0;
        for (first, second) in ranges().flat_map(|one| ranges().map(move |two| (one, two))) {
            for ends_first in [0, 1] {
                let orphans = Arc::new(Orphans::default());
                let mut all: Vec<_> = [first, second]
                    .map(|range| (range, orphans.adopt(range.0, range.1).unwrap()))
                    .into();
                for remaining in [2, 1, 0] {
                    assert_eq!(orphans.len(), remaining);
                    for range in ranges() {
                        let expected = all.iter().any(|(orphan, _)| overlap(*orphan, range));
                        let write = Op::Write { fua: true };
                        for op in [Op::Read, write, Op::Discard, Op::Compare, Op::Verify] {
                            let request = request(op, range.0, range.1);
                            assert_eq!(orphans.blocks(&request, waker), expected, "{request:?}");
                            checked += 1;
                        }
                    }
                    let flush = request(Op::Flush, 0, 0);
                    assert_eq!(orphans.blocks(&flush, waker), remaining != 0);
                    if remaining != 0 {
                        drop(all.remove(ends_first % remaining));
                    }
                }
            }
        }
        assert_eq!(checked, 18 * 18 * 2 * 3 * 18 * 5);
    }

    #[test]
    fn the_number_of_orphans_is_bounded() {
        let orphans = Arc::new(Orphans::default());
        let mut all: Vec<_> = (0..MAX as u64).map(|at| orphans.adopt(at, 1).unwrap()).collect();
        assert!(orphans.adopt(0, 1).is_none());
        all.pop();
        assert!(orphans.adopt(0, 1).is_some());
    }
}
