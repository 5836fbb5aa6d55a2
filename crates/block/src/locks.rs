//! Locks of written ranges. They prevent that a read-modify-write of a partial block reverts
//! concurrent writes to the same block.

use parking_lot::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Locked ranges, and waiting lock requests.
///
/// Writers of whole blocks share their range, because a disk guarantees no order of overlapping
/// writes. A change of a partial block locks its range exclusively, and so does a write that the
/// disk has not completed although its client has an error or is disconnected. A request never
/// overtakes an earlier request that it conflicts with, so no request starves.
#[derive(Default)]
pub(crate) struct RangeLocks(Mutex<Table>);

#[derive(Default)]
struct Table {
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    next: u64,
    /// Number of exclusive entries. While it is 0, shared requests need no conflict check.
    exclusive: usize,
    waiting: usize,
}

struct Entry {
    /// Sequence number. Earlier requests have lower numbers.
    order: u64,
    first: u64,
    end: u64,
    exclusive: bool,
    /// Waker of the request while it waits.
    waker: Option<Waker>,
}

impl Entry {
    fn conflicts(&self, other: &Self) -> bool {
        (self.exclusive || other.exclusive) && self.first < other.end && other.first < self.end
    }
}

impl Table {
    fn insert(&mut self, entry: Entry) -> usize {
        self.exclusive += usize::from(entry.exclusive);
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        if let Some(place) = self.entries.get_mut(index) {
            *place = Some(entry);
        }
        index
    }

    /// True if an earlier entry conflicts with this one.
    fn is_blocked(&self, entry: &Entry) -> bool {
        if self.exclusive == 0 {
            return false;
        }
        let mut others = self.entries.iter().flatten();
        others.any(|other| other.order < entry.order && other.conflicts(entry))
    }

    /// Removes an entry. Returns the wakers of requests that can now continue. The wakers must be
    /// called without the lock.
    fn remove(&mut self, index: usize) -> Vec<Waker> {
        let Some(removed) = self.entries.get_mut(index).and_then(Option::take) else {
            return Vec::new();
        };
        self.free.push(index);
        self.exclusive -= usize::from(removed.exclusive);
        self.waiting -= usize::from(removed.waker.is_some());
        if self.waiting == 0 {
            return Vec::new();
        }
        let waiting = self.entries.iter().flatten().filter(|entry| entry.waker.is_some());
        let free = waiting.filter(|entry| entry.conflicts(&removed) && !self.is_blocked(entry));
        free.filter_map(|entry| entry.waker.clone()).collect()
    }
}

impl RangeLocks {
    /// Locks `first..end`. The request gets its place in the order when the future is first polled.
    pub(crate) fn acquire(self: &Arc<Self>, first: u64, end: u64, exclusive: bool) -> Acquire {
        Acquire { locks: Arc::clone(self), first, end, exclusive, index: None }
    }

    fn remove(&self, index: usize) {
        let wakers = self.0.lock().remove(index);
        wakers.into_iter().for_each(Waker::wake);
    }
}

/// A locked range. The drop of the guard unlocks the range.
pub(crate) struct RangeGuard {
    locks: Arc<RangeLocks>,
    index: usize,
}

impl RangeGuard {
    /// Makes the lock exclusive: later requests for the range wait until the lock is released.
    pub(crate) fn make_exclusive(&self) {
        let mut table = self.locks.0.lock();
        if let Some(entry) = table.entries.get_mut(self.index).and_then(Option::as_mut) {
            let was_exclusive = std::mem::replace(&mut entry.exclusive, true);
            table.exclusive += usize::from(!was_exclusive);
        }
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        self.locks.remove(self.index);
    }
}

/// Future of [`RangeLocks::acquire`].
pub(crate) struct Acquire {
    locks: Arc<RangeLocks>,
    first: u64,
    end: u64,
    exclusive: bool,
    /// Index of the entry while the request waits.
    index: Option<usize>,
}

impl Future for Acquire {
    type Output = RangeGuard;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<RangeGuard> {
        let this = &mut *self;
        let mut table = this.locks.0.lock();
        let index = match this.index {
            Some(index) => index,
            None => {
                let order = table.next;
                table.next += 1;
                let Self { first, end, exclusive, .. } = *this;
                let index = table.insert(Entry { order, first, end, exclusive, waker: None });
                this.index = Some(index);
                index
            }
        };
        let blocked = table.entries.get(index).and_then(Option::as_ref);
        let blocked = blocked.is_some_and(|entry| table.is_blocked(entry));
        let waker = blocked.then(|| context.waker().clone());
        let mut stale = None;
        if let Some(entry) = table.entries.get_mut(index).and_then(Option::as_mut) {
            stale = std::mem::replace(&mut entry.waker, waker);
        }
        match (stale.is_some(), blocked) {
            (false, true) => table.waiting += 1,
            (true, false) => table.waiting -= 1,
            _ => {}
        }
        drop(table);
        drop(stale);
        if blocked {
            return Poll::Pending;
        }
        this.index = None;
        Poll::Ready(RangeGuard { locks: Arc::clone(&this.locks), index })
    }
}

impl Drop for Acquire {
    fn drop(&mut self) {
        if let Some(index) = self.index {
            self.locks.remove(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(acquire: &mut Acquire) -> Option<RangeGuard> {
        let mut context = Context::from_waker(Waker::noop());
        match Pin::new(acquire).poll(&mut context) {
            Poll::Ready(guard) => Some(guard),
            Poll::Pending => None,
        }
    }

    #[test]
    fn writers_of_whole_blocks_share_and_those_of_parts_do_not() {
        let locks = Arc::new(RangeLocks::default());
        let one = poll(&mut locks.acquire(0, 100, false)).unwrap();
        let two = poll(&mut locks.acquire(50, 150, false)).unwrap();
        let mut part = locks.acquire(90, 91, true);
        assert!(poll(&mut part).is_none());
        let elsewhere = poll(&mut locks.acquire(150, 151, true)).unwrap();
        drop(one);
        assert!(poll(&mut part).is_none());
        drop(two);
        let part = poll(&mut part).unwrap();
        assert!(poll(&mut locks.acquire(90, 91, true)).is_none());
        assert!(poll(&mut locks.acquire(0, 91, false)).is_none());
        assert!(poll(&mut locks.acquire(91, 92, true)).is_some());
        drop((part, elsewhere));
        let table = locks.0.lock();
        assert_eq!((table.exclusive, table.waiting, table.free.len()), (0, 0, table.entries.len()));
    }

    #[test]
    fn none_overtakes_one_that_waits_for_the_same() {
        let locks = Arc::new(RangeLocks::default());
        let first = poll(&mut locks.acquire(0, 10, false)).unwrap();
        let mut second = locks.acquire(0, 10, true);
        assert!(poll(&mut second).is_none());
        // This request is compatible with the first request, but conflicts with the second one.
        let mut third = locks.acquire(5, 6, false);
        assert!(poll(&mut third).is_none());
        drop(first);
        assert!(poll(&mut third).is_none());
        let second = poll(&mut second).unwrap();
        assert!(poll(&mut third).is_none());
        drop(second);
        assert!(poll(&mut third).is_some());
    }

    #[test]
    fn a_lock_that_becomes_exclusive_delays_later_requests_only() {
        let locks = Arc::new(RangeLocks::default());
        let earlier = poll(&mut locks.acquire(0, 10, false)).unwrap();
        let late = poll(&mut locks.acquire(0, 10, false)).unwrap();
        late.make_exclusive();
        late.make_exclusive();
        let mut later = locks.acquire(5, 6, false);
        assert!(poll(&mut later).is_none());
        drop(late);
        assert!(poll(&mut later).is_some());
        drop(earlier);
        assert_eq!(locks.0.lock().exclusive, 0);
    }

    #[test]
    fn a_dropped_waiter_blocks_no_other_request() {
        let locks = Arc::new(RangeLocks::default());
        let _first = poll(&mut locks.acquire(0, 10, false)).unwrap();
        let mut second = locks.acquire(0, 10, true);
        assert!(poll(&mut second).is_none());
        let mut third = locks.acquire(5, 6, false);
        assert!(poll(&mut third).is_none());
        drop(second);
        assert!(poll(&mut third).is_some());
        assert_eq!(locks.0.lock().waiting, 0);
    }
}
