//! Allocation status of byte ranges, queried on a separate thread.
//!
//! A query may wait for the storage, but a thread that serves requests must not wait. The separate
//! thread exists only while there are queries.

use parking_lot::{Condvar, Mutex};
use shadowbell_disk::Disk;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

/// Time after which the idle thread ends.
const IDLE_TIMEOUT: Duration = Duration::from_millis(200);

/// Contiguous bytes with the same allocation status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Number of bytes, at least one.
    pub len: u64,
    /// True if the bytes are deallocated and read as zeroes. False if they may hold data.
    pub is_hole: bool,
}

/// Extents of a range. The range must be within the disk. Returns at most `max_extents` extents.
pub(crate) async fn extents(
    queries: &Arc<ExtentQueries>,
    disk: &Arc<dyn Disk>,
    offset: u64,
    len: u64,
    max_extents: usize,
) -> Vec<Extent> {
    if len == 0 {
        return Vec::new();
    }
    let answer = Arc::<Mutex<Answer>>::default();
    queries.enqueue(Query {
        disk: Arc::clone(disk),
        offset,
        len,
        max_extents: max_extents.max(1),
        answer: Arc::clone(&answer),
    });
    poll_fn(|context| {
        let mut answer = answer.lock();
        match answer.found.take() {
            Some(found) => Poll::Ready(found),
            None => {
                answer.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    })
    .await
}

/// Extents of `len` bytes of the disk, at most `max_extents`. Adjacent bytes with the same status
/// are in one extent.
fn find(disk: &dyn Disk, offset: u64, len: u64, max_extents: usize) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut left = len;
    disk.extents(offset, len, &mut |found| {
        let len = found.len.min(left);
        left -= len;
        let (is_hole, count) = (!found.allocated, extents.len());
        match extents.last_mut() {
            Some(last) if last.is_hole == is_hole => last.len += len,
            // The extent that follows differs in its status, so the last extent is complete.
            Some(_) if count == max_extents => return false,
            _ if len > 0 => extents.push(Extent { len, is_hole }),
            _ => {}
        }
        left > 0
    });
    if extents.is_empty() {
        extents.push(Extent { len, is_hole: false });
    }
    extents
}

struct Query {
    disk: Arc<dyn Disk>,
    offset: u64,
    len: u64,
    max_extents: usize,
    answer: Arc<Mutex<Answer>>,
}

#[derive(Default)]
struct Answer {
    found: Option<Vec<Extent>>,
    waker: Option<Waker>,
}

#[derive(Default)]
struct Work {
    queries: VecDeque<Query>,
    has_thread: bool,
}

/// Queue of the queries, and the thread that executes them.
#[derive(Default)]
pub(crate) struct ExtentQueries {
    work: Mutex<Work>,
    arrived: Condvar,
}

impl ExtentQueries {
    fn enqueue(self: &Arc<Self>, query: Query) {
        let mut work = self.work.lock();
        work.queries.push_back(query);
        if work.has_thread {
            self.arrived.notify_one();
            return;
        }
        let ours = Arc::clone(self);
        let thread = std::thread::Builder::new().name("sb-extents".into());
        work.has_thread = thread.spawn(move || ours.run()).is_ok();
        if !work.has_thread {
            let queries = std::mem::take(&mut work.queries);
            drop(work);
            for query in queries {
                let all = vec![Extent { len: query.len, is_hole: false }];
                query.end(all);
            }
        }
    }

    fn run(&self) {
        let mut work = self.work.lock();
        loop {
            if let Some(query) = work.queries.pop_front() {
                drop(work);
                let Query { disk, offset, len, max_extents, .. } = &query;
                let found = find(&**disk, *offset, *len, *max_extents);
                query.end(found);
                work = self.work.lock();
            } else if self.arrived.wait_for(&mut work, IDLE_TIMEOUT).timed_out()
                && work.queries.is_empty()
            {
                work.has_thread = false;
                return;
            }
        }
    }
}

impl Query {
    fn end(self, found: Vec<Extent>) {
        let Self { disk, answer, .. } = self;
        // The disk is dropped before the wakeup. The woken caller may drop all other handles, and
        // the last handle must be dropped on the caller's thread, not on the thread that runs this
        // code.
        drop(disk);
        let mut answer = answer.lock();
        answer.found = Some(found);
        let waker = answer.waker.take();
        drop(answer);
        waker.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_disk_file::MemDisk;

    #[test]
    fn neighbours_are_merged_and_the_number_is_limited() {
        let disk = MemDisk::recoverable(2048, 512).unwrap();
        for at in [0, 256 << 10, 512 << 10] {
            disk.bytes().write_from(at, &[1; 4096]).unwrap();
        }
        let found = |offset, len, max_extents| {
            let found = find(&disk, offset, len, max_extents);
            assert!(found.iter().map(|extent| extent.len).sum::<u64>() <= len);
            found.iter().map(|extent| extent.is_hole).collect::<Vec<_>>()
        };
        assert_eq!(found(0, 1 << 20, 10), [false, true, false, true, false, true]);
        assert_eq!(found(0, 1 << 20, 3), [false, true, false]);
        assert_eq!(found(100, 5, 3), [false]);
        assert_eq!(found((1 << 20) - 5, 5, 3), [true]);
    }
}
