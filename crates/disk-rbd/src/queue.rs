//! Queue of an I/O thread on an image. Each request is executed by one or several calls of librbd.

use crate::completions::{CallResult, Completions};
use crate::shared::Shared;
use crate::sys::{Cache, Call};
use shadowbell_disk::{Bounds, DiskError, Op, Queue, Request, Submitted, Tasks};
use shadowbell_memory::{AfterChange, Segments, View, ViewChange};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;

/// Maximum total size in bytes of the buffers of calls in flight. Further calls wait.
const BUFFERS: u64 = 32 << 20;
/// Maximum length of one call in bytes, for a call with data and for a call that writes zeroes.
const DATA: u64 = 4 << 20;
const ZEROES: u64 = 64 << 20;

struct Task {
    /// Number of the task, unique among the tasks of the queue.
    number: u64,
    request: Request,
    data: Segments,
    /// Number of bytes for which calls were started.
    submitted: u64,
    in_flight: u32,
    /// Ids of the calls so far.
    calls: Calls,
    outcome: Result<(), DiskError>,
    /// True if the data of each call have to be durable when the call completes.
    fua: bool,
    flushes_after: bool,
    is_cancelled: bool,
}

/// Ids of a task's calls. Most tasks have one call, and need no allocation.
#[derive(Default)]
struct Calls {
    first: Option<u64>,
    more: Vec<u64>,
}

impl Calls {
    fn add(&mut self, id: u64) {
        match self.first {
            None => self.first = Some(id),
            Some(_) => self.more.push(id),
        }
    }

    fn iter(&self) -> impl Iterator<Item = u64> {
        self.first.into_iter().chain(self.more.iter().copied())
    }
}

/// Call of librbd in flight: its task, and the range of the task's request that it covers.
struct Subrequest {
    task: u32,
    /// Number of the task. If the task with this key has another number, the original one was
    /// cancelled and has ended, and its key was reused. [`RELEASED`] for a call that no longer
    /// belongs to a task.
    number: u64,
    at: u64,
    len: u64,
}

/// Task number of a call whose task has been cancelled and does not wait for it.
const RELEASED: u64 = 0;

pub(crate) struct RbdQueue {
    shared: Shared,
    bounds: Bounds,
    /// Completions, which Ceph's threads add.
    completions: Arc<Completions>,
    /// Waker of this queue, called when an orphan that a request waits for has ended.
    waker: Waker,
    /// Value of `Orphans::ended` when blocked requests were last checked.
    orphans_ended: u64,
    /// Requests that have not ended. Those in the waiting list have calls that are not started yet.
    tasks: Tasks<Task>,
    /// Number of tasks so far.
    count: u64,
    subrequests: HashMap<u64, Subrequest>,
    next: u64,
    bytes: u64,
    ended: Vec<CallResult>,
}

impl Task {
    /// True if all calls were started, or if no more calls are needed because the task has failed.
    fn is_all_submitted(&self) -> bool {
        self.outcome.is_err()
            || (self.submitted == self.request.len && !(self.flushes_after && self.in_flight == 0))
    }
}

impl RbdQueue {
    pub(crate) fn new(shared: Shared) -> io::Result<Self> {
        let completions = Arc::new(Completions::new(&shared.opened.orphans)?);
        Ok(Self {
            bounds: shared.info.bounds(),
            shared,
            waker: Waker::from(Arc::clone(&completions)),
            completions,
            orphans_ended: 0,
            tasks: Tasks::default(),
            count: 0,
            subrequests: HashMap::new(),
            next: 0,
            bytes: 0,
            ended: Vec::new(),
        })
    }

    /// Selects how `op` becomes durable. The first flag is true if each librbd call of `op` has to
    /// be durable when it completes. The second flag is true if a flush has to follow these calls.
    fn is_durable(&self, op: Op) -> (bool, bool) {
        let fua = match op {
            Op::Write { fua } | Op::CompareAndWrite { fua } | Op::WriteZeroes { fua, .. } => fua,
            Op::Discard => false,
            _ => return (false, false),
        };
        let wanted = fua || self.shared.opened.lasts.load(Ordering::Relaxed);
        let by_itself = match self.shared.opened.cache {
            Cache::None => true,
            // librbd's Write Zeroes has no FUA flag.
            Cache::Around => matches!(op, Op::Write { .. } | Op::CompareAndWrite { .. }),
            Cache::Other => false,
        };
        (wanted && by_itself, wanted && !by_itself)
    }

    /// Starts waiting calls within the buffer limit.
    fn begin(&mut self) {
        let orphans = Arc::clone(&self.shared.opened.orphans);
        if self.tasks.has_blocked() {
            let ended = orphans.ended();
            if std::mem::replace(&mut self.orphans_ended, ended) != ended {
                self.tasks.unblock_all();
            }
        }
        while let Some(key) = self.tasks.first_waiting() {
            let Some(task) = self.tasks.get_mut(key) else { break };
            if task.is_all_submitted() {
                if task.in_flight == 0 {
                    self.tasks.finish(key);
                }
                self.tasks.stop_waiting(key);
                continue;
            }
            let left = task.request.len - task.submitted;
            let (op, offset) = (task.request.op, task.request.offset + task.submitted);
            if orphans.blocks(&Request { op, offset, len: left }, &self.waker) {
                self.tasks.block(key);
                continue;
            }
            let (call, len, held) = match task.request.op {
                _ if left == 0 => (Call::Flush, 0, 0),
                Op::Read | Op::Compare | Op::Verify => (Call::Read, left.min(DATA), left.min(DATA)),
                Op::Write { .. } => (Call::Write { fua: task.fua }, left.min(DATA), left.min(DATA)),
                Op::CompareAndWrite { .. } => (Call::CompareAndWrite, left, 2 * left),
                op => {
                    let len = left.min(ZEROES);
                    let is_thick = matches!(op, Op::WriteZeroes { deallocate: false, .. });
                    (Call::Zero { len: len as usize, is_thick }, len, 0)
                }
            };
            if self.bytes != 0 && self.bytes + held > BUFFERS {
                break;
            }
            let mut buffer = vec![0; held as usize];
            if matches!(call, Call::Write { .. } | Call::CompareAndWrite)
                && task.data.read_into(task.submitted as usize, &mut buffer).is_none()
            {
                task.outcome = Err(DiskError::BadBuffer);
                continue;
            }
            if matches!(call, Call::Flush) {
                task.flushes_after = false;
            }
            let id = self.next;
            self.next += 1;
            let number = task.number;
            self.subrequests.insert(id, Subrequest { task: key, number, at: task.submitted, len });
            task.calls.add(id);
            task.submitted += len;
            task.in_flight += 1;
            self.bytes += held;
            if let Some(image) = &self.shared.opened.image {
                image.start(id, &call, offset, buffer, &self.completions);
            }
        }
    }

    fn end(&mut self, ended: CallResult) {
        let CallResult { id, value, buffer } = ended;
        self.completions.ended(id);
        self.bytes -= buffer.len() as u64;
        let Some(Subrequest { task: key, number, at, len }) = self.subrequests.remove(&id) else {
            return;
        };
        let task = self.tasks.get_mut(key).filter(|task| task.number == number);
        // If the request was cancelled, its task has ended. Then only the buffer of this librbd
        // call is released.
        let Some(task) = task.filter(|task| task.in_flight != 0) else { return };
        task.in_flight -= 1;
        let full = &self.shared.opened.is_full;
        let result = match (value, task.request.op) {
            (..0, op) => Err(status(value, matches!(op, Op::Read | Op::Compare | Op::Verify))),
            // The read was short, because the image has been shrunk.
            (_, Op::Read | Op::Compare | Op::Verify) if (value as u64) < len => {
                Err(DiskError::OutOfRange)
            }
            (_, Op::Read) => task.data.write_from(at as usize, &buffer).ok_or(DiskError::BadBuffer),
            (_, Op::Compare) => {
                let mut own = vec![0; buffer.len()];
                match task.data.read_into(at as usize, &mut own) {
                    None => Err(DiskError::BadBuffer),
                    Some(()) if own == buffer => Ok(()),
                    Some(()) => Err(DiskError::CompareFailed),
                }
            }
            (_, Op::Write { .. } | Op::CompareAndWrite { .. }) => {
                full.store(false, Ordering::Relaxed);
                Ok(())
            }
            _ => Ok(()),
        };
        if result == Err(DiskError::NoSpace) {
            full.store(true, Ordering::Relaxed);
        }
        task.outcome = task.outcome.and(result);
        if task.in_flight == 0 {
            // All calls of the task have ended. The task is queued again, to start its flush or to
            // end.
            self.tasks.wait(key);
        }
    }

    /// Ends a request early with `error`. The results of its started reads are ignored, and its
    /// started writes become orphans. If there are too many orphans, the request ends only after
    /// its started writes.
    fn end_early(&mut self, key: u32, error: DiskError) {
        let Some(task) = self.tasks.get_mut(key) else { return };
        let reads = matches!(task.request.op, Op::Read | Op::Compare | Op::Verify);
        if task.is_cancelled {
            return;
        }
        let mut released = 0;
        for id in task.calls.iter() {
            let Some(call) = self.subrequests.get_mut(&id) else { continue };
            // The librbd call of a cancelled write continues. A later write of the host must take
            // effect after it, so the call becomes an orphan.
            let offset = task.request.offset + call.at;
            let has_range = !reads && call.len != 0;
            if !has_range || self.completions.adopt(id, offset, call.len) {
                call.number = RELEASED;
                released += 1;
            }
        }
        if released == 0 && task.is_all_submitted() {
            return;
        }
        task.is_cancelled = true;
        task.outcome = task.outcome.and(Err(error));
        task.in_flight -= released;
        self.tasks.wait_first(key);
        // The next call of `reap` ends the request. The signal makes the I/O thread call `reap`.
        self.completions.queue.signal();
    }
}

/// Disk error for the return value of a call.
fn status(value: i64, reads: bool) -> DiskError {
    match i32::try_from(-value) {
        Ok(libc::ENOSPC | libc::EDQUOT) if !reads => DiskError::NoSpace,
        Ok(libc::EROFS) => DiskError::ReadOnly,
        // Only a compare and write returns this error.
        Ok(libc::EILSEQ) => DiskError::CompareFailed,
        Ok(libc::EOPNOTSUPP) => DiskError::Unsupported,
        // librbd returns this error for a range beyond the end of the image.
        Ok(libc::EINVAL) => DiskError::OutOfRange,
        Ok(error) => DiskError::Io(error),
        Err(_) => DiskError::Io(libc::EIO),
    }
}

impl Queue for RbdQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        if let Err(error) = request.check(&self.bounds, data) {
            return Submitted::Done(Err(error));
        }
        let mut request = *request;
        let flushes_after = match request.op {
            Op::Flush if self.shared.info.read_only => return Submitted::Done(Ok(())),
            Op::Flush => {
                (request.offset, request.len) = (0, 0);
                true
            }
            _ if request.len == 0 => return Submitted::Done(Ok(())),
            Op::CompareAndWrite { .. } if !self.compares_and_writes() => {
                return Submitted::Done(Err(DiskError::Unsupported));
            }
            Op::Write { .. }
            | Op::CompareAndWrite { .. }
            | Op::WriteZeroes { .. }
            | Op::Discard
            | Op::Read
            | Op::Compare
            | Op::Verify => false,
            _ => return Submitted::Done(Err(DiskError::Unsupported)),
        };
        let (fua, by_flush) = self.is_durable(request.op);
        let flushes_after = flushes_after || by_flush;
        self.count += 1;
        let task = Task {
            number: self.count,
            request,
            data: data.take(),
            submitted: 0,
            in_flight: 0,
            calls: Calls::default(),
            outcome: Ok(()),
            fua,
            flushes_after,
            is_cancelled: false,
        };
        let key = self.tasks.insert(tag, task);
        self.tasks.wait(key);
        Submitted::Pending
    }

    /// True if a block never crosses a stripe unit. Ceph supports a compare and write only within a
    /// stripe unit.
    fn compares_and_writes(&self) -> bool {
        let (unit, block) = (self.shared.opened.unit, u64::from(self.shared.info.block_size));
        !self.shared.info.read_only && unit != 0 && unit.is_multiple_of(block)
    }

    fn commit(&mut self) {
        self.begin();
        if self.tasks.has_finished() {
            self.completions.queue.signal();
        }
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        let mut ended = std::mem::take(&mut self.ended);
        self.completions.queue.take(&mut ended);
        ended.drain(..).for_each(|ended| self.end(ended));
        self.ended = ended;
        self.begin();
        while let Some((tag, task)) = self.tasks.take_finished() {
            done(tag, task.outcome, task.data);
        }
    }

    fn cancel(&mut self, tag: u32) {
        if let Some(key) = self.tasks.find(tag) {
            self.end_early(key, DiskError::Cancelled);
        }
    }

    fn memory_changed(&mut self, view: &View) {
        let mut change = ViewChange::new(view);
        let keys: Vec<_> = self.tasks.keys().collect();
        for key in keys {
            let Some(task) = self.tasks.get_mut(key) else { continue };
            // If all calls of a write were started, its data were copied, and its buffer can be
            // released.
            if matches!(task.request.op, Op::Write { .. } | Op::CompareAndWrite { .. })
                && task.submitted == task.request.len
            {
                task.data.release_view();
            }
            if task.data.move_to(&mut change) == AfterChange::Unmapped {
                self.end_early(key, DiskError::BadBuffer);
            }
        }
    }

    fn pending(&self) -> usize {
        self.tasks.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.completions.queue.as_fd())
    }

    /// Returns true, because the librbd call of a cancelled read may complete while no request is
    /// pending. The queue is not reaped then, and a level-triggered descriptor would wake the
    /// thread again and again.
    fn wakes_by_edges(&self) -> bool {
        true
    }
}

impl Drop for RbdQueue {
    /// Ends the orphans whose calls have completed. Other orphans end when their calls complete.
    fn drop(&mut self) {
        let mut ended = std::mem::take(&mut self.ended);
        self.completions.queue.take(&mut ended);
        ended.into_iter().for_each(|ended| self.completions.ended(ended.id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::Opened;
    use shadowbell_disk::DiskInfo;
    use shadowbell_testing::disks::{memory, segments};
    use std::sync::atomic::AtomicBool;

    /// State of a disk whose cluster does not answer. Calls complete only when the test completes
    /// them.
    fn hung() -> Shared {
        let opened = Opened {
            image: None,
            name: "rbd:hung".to_owned(),
            unit: 4 << 20,
            is_full: AtomicBool::new(false),
            cache: Cache::None,
            lasts: AtomicBool::new(false),
            orphans: Arc::default(),
        };
        Shared { opened: Arc::new(opened), info: DiskInfo::new(512, 1 << 20) }
    }

    fn submit(queue: &mut RbdQueue, tag: u32, op: Op, offset: u64, len: u64) {
        let has_data = matches!(op, Op::Read | Op::Write { .. });
        let bytes = memory(if has_data { len as usize } else { 512 });
        let mut data = if has_data { segments(&bytes, 0, len as usize) } else { Segments::new() };
        let submitted = queue.submit(tag, &Request { op, offset, len }, &mut data);
        assert_eq!(submitted, Submitted::Pending);
        queue.commit();
    }

    fn reap(queue: &mut RbdQueue) -> Vec<(u32, Result<(), DiskError>)> {
        let mut ended = Vec::new();
        queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
        ended
    }

    /// Completes a call, as one of Ceph's threads does.
    fn complete(completions: &Completions, id: u64, len: usize) {
        completions.push(CallResult { id, value: 0, buffer: vec![0; len] });
    }

    #[test]
    fn writes_on_a_hung_cluster_are_cancelled_at_once_and_later_requests_wait_for_them() {
        let shared = hung();
        let orphans = Arc::clone(&shared.opened.orphans);
        let write = Op::Write { fua: false };
        let mut queue = RbdQueue::new(shared.clone()).unwrap();
        submit(&mut queue, 1, write, 0, 512);
        // Two calls, of 4 MiB each.
        submit(&mut queue, 2, write, 8 << 20, 8 << 20);
        submit(&mut queue, 3, Op::Flush, 0, 0);
        submit(&mut queue, 4, Op::Read, 1 << 20, 512);
        assert!(reap(&mut queue).is_empty());
        (1..=4).for_each(|tag| queue.cancel(tag));
        let ended = reap(&mut queue);
        assert!(ended.iter().all(|(_, outcome)| *outcome == Err(DiskError::Cancelled)));
        assert_eq!((ended.len(), queue.pending(), orphans.len()), (4, 0, 3));
        let completions = Arc::clone(&queue.completions);
        let calls: Vec<_> = queue.subrequests.iter().map(|(id, call)| (*id, call.at)).collect();
        drop(queue);
        assert_eq!(orphans.len(), 3);

        let mut queue = RbdQueue::new(shared).unwrap();
        submit(&mut queue, 1, Op::Read, 0, 512);
        submit(&mut queue, 2, Op::Flush, 0, 0);
        submit(&mut queue, 3, Op::Read, 4096, 512);
        assert_eq!(queue.subrequests.len(), 1, "only the read elsewhere was started");
        queue.cancel(2);
        assert_eq!(reap(&mut queue), [(2, Err(DiskError::Cancelled))]);
        for (id, _) in &calls {
            complete(&completions, *id, 0);
        }
        assert!(orphans.is_empty());
        assert!(reap(&mut queue).is_empty());
        assert_eq!(queue.subrequests.len(), 2, "the read was started after the orphan");
    }

    #[test]
    fn an_orphan_whose_call_has_completed_ends_with_the_queue() {
        let shared = hung();
        let orphans = Arc::clone(&shared.opened.orphans);
        let mut queue = RbdQueue::new(shared).unwrap();
        submit(&mut queue, 1, Op::Write { fua: false }, 0, 512);
        let id = *queue.subrequests.keys().next().unwrap();
        complete(&queue.completions, id, 512);
        queue.cancel(1);
        assert_eq!(orphans.len(), 1);
        // This clone takes the place of the reference that a call in flight has.
        let completions = Arc::clone(&queue.completions);
        drop(queue);
        assert!(orphans.is_empty());
        drop(completions);
    }

    #[test]
    fn rbd_errors_are_converted_to_disk_errors() {
        for (value, reads, expected) in [
            (-28, false, DiskError::NoSpace),
            (-122, false, DiskError::NoSpace),
            (-28, true, DiskError::Io(28)),
            (-30, false, DiskError::ReadOnly),
            (-84, false, DiskError::CompareFailed),
            (-95, false, DiskError::Unsupported),
            (-22, true, DiskError::OutOfRange),
            (-108, false, DiskError::Io(108)),
            (i64::MIN + 1, false, DiskError::Io(5)),
        ] {
            assert_eq!(status(value, reads), expected, "{value}");
        }
    }
}
