//! Queue of an I/O thread on an image.

use crate::fast_path::{Back, FastPath};
use crate::pool::{Ended, Job, Pool};
use crate::storage::{ALIGNMENT, IoBuffer};
use shadowbell_disk::{Bounds, CompletionQueue, DiskError, Op, Queue, Request, Submitted};
use shadowbell_memory::Segments;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Maximum total size in bytes of the buffers of slow-path requests in flight. Further requests
/// wait.
const BUFFERS: usize = 32 << 20;
/// Size in bytes of reusable buffers, and maximum number of unused ones.
const KEPT_LEN: usize = 128 << 10;
const KEPT: usize = 64;

pub(crate) struct QcowQueue {
    pool: Arc<Pool>,
    /// Fast path, if io_uring is available.
    fast: Option<FastPath>,
    /// Scratch buffer for requests that have to be repeated on the slow path.
    back: Vec<Back>,
    completions: Arc<CompletionQueue<Ended>>,
    bounds: Bounds,
    /// Requests of the caller on the slow path, by job number.
    requests: HashMap<u64, Pending>,
    by_tag: HashMap<u32, u64>,
    next_id: u64,
    /// Job numbers of requests that were not started, in order. Those of cancelled requests are
    /// skipped.
    waiting: VecDeque<u64>,
    /// Cancelled requests, until `reap` returns them.
    cancelled: Vec<u64>,
    /// Total size of the buffers of started requests, in bytes.
    in_use: usize,
    /// Free buffers of `KEPT_LEN` bytes.
    kept: Vec<IoBuffer>,
    /// Scratch buffers.
    ended: Vec<Ended>,
    begun: Vec<Job>,
}

struct Pending {
    tag: u32,
    request: Request,
    data: Segments,
    /// True if the job was passed to the threads, so that one may be executing it.
    has_begun: bool,
}

impl QcowQueue {
    pub(crate) fn new(pool: Arc<Pool>) -> io::Result<Self> {
        let completions = CompletionQueue::new()?;
        let bytes = pool.image().bytes.as_ref();
        let fast = bytes.map(|bytes| bytes.queue(completions.as_fd())).transpose()?;
        Ok(Self {
            bounds: pool.image().info.bounds(),
            fast: fast.map(FastPath::new),
            back: Vec::new(),
            completions: Arc::new(completions),
            pool,
            requests: HashMap::new(),
            by_tag: HashMap::new(),
            next_id: 0,
            waiting: VecDeque::new(),
            cancelled: Vec::new(),
            in_use: 0,
            kept: Vec::new(),
            ended: Vec::new(),
            begun: Vec::new(),
        })
    }

    /// Queues a request for the slow path.
    fn enqueue(&mut self, tag: u32, request: Request, data: Segments) {
        let id = self.next_id;
        self.next_id += 1;
        self.requests.insert(id, Pending { tag, request, data, has_begun: false });
        self.by_tag.insert(tag, id);
        self.waiting.push_back(id);
    }

    /// Starts waiting requests within the buffer limit.
    fn begin(&mut self) {
        while let Some(id) = self.waiting.front().copied() {
            let Some(pending) = self.requests.get_mut(&id) else {
                self.waiting.pop_front();
                continue;
            };
            let request = pending.request;
            let len = match request.op {
                Op::Read | Op::Write { .. } | Op::Compare => request.len as usize,
                _ => 0,
            };
            if self.in_use != 0 && self.in_use + size_of_buffer(len) > BUFFERS {
                break;
            }
            self.waiting.pop_front();
            pending.has_begun = true;
            let buffer = match self.fill(id, len) {
                Ok(buffer) => buffer,
                Err(error) => {
                    let to = &self.completions;
                    to.push(Ended { id, result: Err(error), buffer: None });
                    continue;
                }
            };
            let to = Arc::clone(&self.completions);
            self.begun.push(Job { id, request, buffer, to });
        }
        if !self.begun.is_empty() {
            self.pool.submit(self.begun.drain(..));
        }
    }

    /// Returns a buffer for the data of the request. The buffer contains the data to write or to
    /// compare.
    fn fill(&mut self, id: u64, len: usize) -> Result<Option<IoBuffer>, DiskError> {
        if len == 0 {
            return Ok(None);
        }
        let kept = if len <= KEPT_LEN { self.kept.pop() } else { None };
        let mut buffer = match kept {
            Some(buffer) => buffer,
            None => IoBuffer::new(size_of_buffer(len)),
        };
        self.in_use += buffer.len();
        if let Some(pending) = self.requests.get(&id)
            && pending.request.op != Op::Read
            && pending.data.read_into(0, &mut buffer[..len]).is_none()
        {
            self.give_back(buffer);
            return Err(DiskError::BadBuffer);
        }
        Ok(Some(buffer))
    }

    fn give_back(&mut self, buffer: IoBuffer) {
        self.in_use -= buffer.len();
        if buffer.len() == KEPT_LEN && self.kept.len() < KEPT {
            self.kept.push(buffer);
        }
    }

    /// Removes the request with job number `id`.
    fn remove(&mut self, id: u64) -> Option<Pending> {
        let pending = self.requests.remove(&id)?;
        if self.by_tag.get(&pending.tag) == Some(&id) {
            self.by_tag.remove(&pending.tag);
        }
        Some(pending)
    }
}

fn size_of_buffer(len: usize) -> usize {
    if len == 0 { 0 } else { len.next_multiple_of(ALIGNMENT).max(KEPT_LEN) }
}

impl Queue for QcowQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        if let Err(error) = request.check(&self.bounds, data) {
            return Submitted::Done(Err(error));
        }
        let info = &self.pool.image().info;
        match request.op {
            Op::Flush if info.read_only => return Submitted::Done(Ok(())),
            Op::Flush => {}
            _ if request.len == 0 => return Submitted::Done(Ok(())),
            Op::Discard if !info.discard => return Submitted::Done(Ok(())),
            _ => {}
        }
        if let Some(fast) = &mut self.fast
            && let Some(submitted) = fast.submit(self.pool.image(), tag, request, data)
        {
            return submitted;
        }
        self.enqueue(tag, *request, data.take());
        Submitted::Pending
    }

    fn may_wait(&mut self) {
        if let Some(fast) = &mut self.fast {
            fast.may_wait();
        }
    }

    fn commit(&mut self) {
        if let Some(fast) = &mut self.fast {
            fast.commit();
        }
        self.begin();
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        if let Some(fast) = &mut self.fast {
            let mut back = std::mem::take(&mut self.back);
            fast.reap(self.pool.image(), &mut back, done);
            for Back { tag, request, data } in back.drain(..) {
                self.enqueue(tag, request, data);
            }
            self.back = back;
        }
        let mut ended = std::mem::take(&mut self.ended);
        self.completions.take(&mut ended);
        for Ended { id, mut result, buffer } in ended.drain(..) {
            // If the request was cancelled, it has already ended. Then only its buffer is released.
            if let Some(pending) = self.remove(id) {
                if let (Op::Read, Ok(()), Some(buffer)) = (pending.request.op, result, &buffer) {
                    let from = &buffer[..pending.request.len as usize];
                    result = pending.data.write_from(0, from).ok_or(DiskError::BadBuffer);
                }
                done(pending.tag, result, pending.data);
            }
            if let Some(buffer) = buffer {
                self.give_back(buffer);
            }
        }
        self.ended = ended;
        while let Some(id) = self.cancelled.pop() {
            if let Some(pending) = self.remove(id) {
                done(pending.tag, Err(DiskError::Cancelled), pending.data);
            }
        }
        self.begin();
    }

    fn cancel(&mut self, tag: u32) {
        if self.fast.as_mut().is_some_and(|fast| fast.cancel(tag)) {
            return;
        }
        let Some(&id) = self.by_tag.get(&tag) else { return };
        let Some(pending) = self.requests.get(&id) else { return };
        let reads = matches!(pending.request.op, Op::Read | Op::Compare | Op::Verify);
        let taken =
            if pending.has_begun { self.pool.take_back(id, &self.completions) } else { None };
        let has_begun = pending.has_begun && taken.is_none();
        if let Some(buffer) = taken.and_then(|job| job.buffer) {
            self.give_back(buffer);
        }
        // A started write is not cancelled: it could still reach the file after a later write of
        // the host.
        if has_begun && !reads {
            return;
        }
        self.by_tag.remove(&tag);
        self.cancelled.push(id);
        // The next call of `reap` ends the request. The signal makes the I/O thread call `reap`.
        self.completions.signal();
    }

    fn pending(&self) -> usize {
        self.requests.len() + self.fast.as_ref().map_or(0, FastPath::pending)
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.fast {
            Some(fast) => fast.wake_fd(),
            None => Some(self.completions.as_fd()),
        }
    }

    /// Returns true, because the job of a cancelled read may complete while no request is pending.
    /// The queue is not reaped then, and a level-triggered descriptor would wake the thread again
    /// and again.
    fn wakes_by_edges(&self) -> bool {
        true
    }
}

impl Drop for QcowQueue {
    /// Waits for requests on the fast path, because the image may be closed afterwards.
    fn drop(&mut self) {
        if let Some(fast) = self.fast.take() {
            fast.close(self.pool.image());
        }
    }
}
