//! Queue of an I/O thread on the namespace, with a queue pair of its own.

use crate::dma_share::DmaShare;
use crate::shared::NvmeDiskShared;
use crate::task::{Next, Task, outcome};
use crate::transfer_stats::{QueueTransferStats, TransferStats};
use rustix::io::Errno;
use shadowbell_disk::{Bounds, DiskError, Queue, Request, Submitted, Tasks};
use shadowbell_driver::{Buffer, BufferPool, Completion, QueuePair};
use shadowbell_memory::{EventFd, Segments, View};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

/// Size in bytes of a small buffer for copied data, which is sufficient for most requests.
const SMALL: u64 = 4096;
/// Size in bytes of a large buffer for copied data, and so the maximum length of a command with
/// copied data.
const LARGE: u64 = 128 << 10;
/// Number of large buffers.
const LARGE_COUNT: usize = 16;
/// Maximum number of memory segments of a zero-copy request. Each segment needs a separate command,
/// so the data of a request with more segments are copied.
const MAX_SEGMENTS: usize = 8;

/// Command in a slot of the queue pair.
#[derive(Clone, Copy, Default)]
struct Subrequest {
    task: u32,
    at: u64,
    len: u64,
    /// True if the SSD accesses guest memory directly for this command.
    in_place: bool,
}

pub(crate) struct NvmeQueue {
    shared: Arc<NvmeDiskShared>,
    bounds: Bounds,
    pair: QueuePair,
    event: Arc<EventFd>,
    small: BufferPool,
    large: BufferPool,
    dma: DmaShare,
    /// Driver buffers of ended zero-copy commands, kept for later commands to save allocations.
    used: Vec<Buffer>,
    /// Requests that have not ended. Those in the waiting list have commands that are not submitted
    /// yet.
    tasks: Tasks<Task>,
    parts: Box<[Subrequest]>,
    /// True after the SSD was removed or disconnected.
    disconnected: bool,
    transfers: TransferStats,
    published: Arc<QueueTransferStats>,
}

impl NvmeQueue {
    pub(crate) fn new(shared: Arc<NvmeDiskShared>, pair: QueuePair) -> io::Result<Self> {
        let event = Arc::new(pair.waker()?);
        shared.disconnect.add(&event);
        let block = u64::from(shared.info.block_size);
        let max_len = shared.namespace.max_transfer_bytes().max(block);
        let buffers = |count, size: u64| {
            let pool = shared.controller.lock().buffers(count, size as usize);
            pool.map_err(io::Error::other)
        };
        let small = buffers(pair.capacity(), SMALL.min(max_len))?;
        let large = buffers(LARGE_COUNT, LARGE.min(max_len / block * block))?;
        Ok(Self {
            bounds: shared.info.bounds(),
            parts: vec![Subrequest::default(); pair.capacity()].into(),
            pair,
            event,
            small,
            large,
            dma: DmaShare::new(shared.shares.clone()),
            used: Vec::new(),
            tasks: Tasks::default(),
            disconnected: false,
            transfers: TransferStats::default(),
            published: shared.transfers.join(),
            shared,
        })
    }

    /// Submits the remaining commands of a task, as far as possible. Returns false if the task has
    /// to wait for a free entry of the queue pair or for a buffer.
    fn start(&mut self, key: u32) -> bool {
        let Self { shared, pair, small, large, dma, used, tasks, parts, transfers, .. } = self;
        let (small, large) = (&*small, &*large);
        let namespace = &shared.namespace;
        let size = namespace.block_size();
        let Some(task) = tasks.get_mut(key) else { return true };
        loop {
            if pair.outstanding() >= pair.capacity() {
                return task.next() == Next::Nothing;
            }
            let next = task.next();
            let (len, own) = match next {
                Next::Nothing => return true,
                Next::NoData => (u64::MAX, None),
                Next::PrivateBuffer { left } => {
                    (left.min(task.max_len(large.buffer_size() as u64, size)), None)
                }
                Next::Data { at, left } => match in_place(dma, used, task, at, left, shared) {
                    Some(buffer) => (buffer.len() as u64, Some(buffer)),
                    None => ((left as u64).min(large.buffer_size() as u64), None),
                },
            };
            let in_place = own.is_some();
            let mut buffer = own;
            if !in_place && next != Next::NoData {
                let needs = task.needs(len);
                let pool = if needs <= small.buffer_size() as u64 { small } else { large };
                let Some(mut taken) = pool.take() else { return false };
                if let Err(error) = task.fill(&mut taken, len, size) {
                    task.outcome = Err(error);
                    return true;
                }
                buffer = Some(taken);
            }
            let (command, len) = match task.command(namespace, len) {
                Ok(command) => command,
                Err(error) => {
                    task.outcome = Err(error);
                    return true;
                }
            };
            match pair.submit(command, buffer) {
                Ok(token) => {
                    let at = task.began(len);
                    transfers.in_place += u64::from(in_place);
                    transfers.copied += u64::from(!in_place && matches!(next, Next::Data { .. }));
                    if let Some(part) = parts.get_mut(token.index()) {
                        *part = Subrequest { task: key, at, len, in_place };
                    }
                }
                Err(refused) => {
                    tracing::debug!("{}: {}", shared.name, refused.reason);
                    task.outcome = Err(DiskError::Io(Errno::IO.raw_os_error()));
                    return true;
                }
            }
        }
    }

    fn start_waiting(&mut self) {
        while let Some(key) = self.tasks.first_waiting() {
            if !self.start(key) {
                return;
            }
            self.tasks.stop_waiting(key);
            self.check_finished(key);
        }
    }

    /// Ends a task that has no command in flight, and so gets no completion that would end it.
    fn check_finished(&mut self, key: u32) {
        if self.tasks.get_mut(key).is_some_and(|task| task.is_finished()) && self.tasks.finish(key)
        {
            // The next call of `reap` reports the result. The event makes the I/O thread call
            // `reap`.
            self.event.signal();
        }
    }

    /// Processes a completion. Returns the key of the task if the task has ended.
    fn complete(&mut self, completion: Completion) -> Option<u32> {
        let Completion { token, status, buffer, .. } = completion;
        let part = self.parts.get(token.index()).copied()?;
        let task = self.tasks.get_mut(part.task)?;
        let mut outcome = outcome(status);
        if part.in_place {
            // The number of buffers for reuse is limited to the number of commands that can be in
            // flight.
            if let Some(buffer) = buffer
                && self.used.len() < self.parts.len()
            {
                self.used.push(buffer);
            }
        } else if outcome.is_ok()
            && let Some(buffer) = buffer
        {
            outcome = task.take(part.at, part.len, buffer.bytes());
        }
        task.complete(outcome);
        task.is_finished().then_some(part.task)
    }

    /// Returns a task to the caller.
    fn finish(&mut self, key: u32, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        if let Some((tag, task)) = self.tasks.remove(key) {
            done(tag, task.outcome, task.data);
        }
    }

    /// Fails all tasks after the SSD was removed or disconnected. No completions would end them.
    fn fail(&mut self, why: &dyn std::fmt::Display) {
        if !std::mem::replace(&mut self.disconnected, true) {
            tracing::error!("{}: {why}", self.shared.name);
        }
        let keys: Vec<u32> = self.tasks.keys().collect();
        for key in keys {
            if let Some(task) = self.tasks.get_mut(key) {
                task.outcome = Err(no_device());
                self.tasks.finish(key);
            }
        }
    }
}

fn no_device() -> DiskError {
    DiskError::Io(Errno::NODEV.raw_os_error())
}

/// Returns a buffer for direct access of the SSD to the task's data from `at` on, up to the end of
/// the memory segment. `None` if the data have to be copied.
fn in_place(
    dma: &mut DmaShare,
    used: &mut Vec<Buffer>,
    task: &Task,
    at: usize,
    left: usize,
    shared: &NvmeDiskShared,
) -> Option<Buffer> {
    let pieces = task.data.pieces();
    if pieces.len() > MAX_SEGMENTS {
        return None;
    }
    let mut skip = at;
    let piece = pieces.iter().find(|piece| {
        let here = skip < piece.len();
        if !here {
            skip -= piece.len();
        }
        here
    })?;
    let address = piece.address() + skip;
    let (memory, offset) = dma.find(address, &task.data)?;
    let max_len = usize::try_from(shared.namespace.max_transfer_bytes()).unwrap_or(usize::MAX);
    let len = (piece.len() - skip).min(left).min(memory.mapping().len() - offset).min(max_len);
    // The buffer is shortened to whole blocks, because a command transfers only these. A data
    // pointer must be aligned to four bytes.
    let whole = len - len % shared.info.block_size as usize;
    if whole == 0 || !address.is_multiple_of(4) {
        return None;
    }
    memory.buffer(offset, whole, used.pop())
}

/// Queue on an SSD that was removed or disconnected: all its requests fail.
pub(crate) struct NoDevice;

impl Queue for NoDevice {
    fn submit(&mut self, _: u32, _: &Request, _: &mut Segments) -> Submitted {
        Submitted::Done(Err(no_device()))
    }
}

impl Queue for NvmeQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        if let Err(error) = request.check(&self.bounds, data) {
            return Submitted::Done(Err(error));
        }
        if self.disconnected {
            return Submitted::Done(Err(no_device()));
        }
        let NvmeDiskShared { namespace, info, .. } = &*self.shared;
        let mut task = match Task::new(request, namespace, info.volatile_cache) {
            Ok(task) => task,
            Err(result) => return Submitted::Done(result),
        };
        task.data = data.take();
        let key = self.tasks.insert(tag, task);
        if self.tasks.first_waiting().is_some() || !self.start(key) {
            self.tasks.wait(key);
        } else {
            self.check_finished(key);
        }
        Submitted::Pending
    }

    fn commit(&mut self) {
        if self.disconnected {
            return;
        }
        self.start_waiting();
        self.published.publish(self.transfers);
        // `prepare_sleep` writes the doorbell, and arms the command timeouts, because the I/O
        // thread may sleep after this call.
        if let Err(error) = self.pair.prepare_sleep() {
            self.fail(&error);
            self.event.signal();
        }
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        while !self.disconnected {
            let mut any = false;
            for _ in 0..self.parts.len() {
                let Some(completion) = self.pair.pop() else { break };
                any = true;
                if let Some(key) = self.complete(completion) {
                    self.finish(key, done);
                }
            }
            if !any {
                // All completions that arrived before the disconnection have been processed.
                if self.shared.disconnect.is_disconnected() {
                    self.fail(&"removed or disconnected; start the server again when it is back");
                }
                break;
            }
            // `prepare_sleep` enables interrupts, and then the loop polls the queue once more. In
            // the other order, a completion that arrives in between would wake no thread.
            self.start_waiting();
            self.published.publish(self.transfers);
            if let Err(error) = self.pair.prepare_sleep() {
                self.fail(&error);
            }
            fence(Ordering::SeqCst);
        }
        while let Some((tag, task)) = self.tasks.take_finished() {
            done(tag, task.outcome, task.data);
        }
    }

    fn cancel(&mut self, tag: u32) {
        let Some(key) = self.tasks.find(tag) else { return };
        let Some(task) = self.tasks.get_mut(key) else { return };
        // Commands at the SSD are not aborted. If all commands were submitted, the task ends
        // normally. Otherwise no further ones are submitted, and the task ends as cancelled after
        // those in flight.
        if task.next() == Next::Nothing {
            return;
        }
        task.outcome = Err(DiskError::Cancelled);
        self.tasks.stop_waiting(key);
        self.check_finished(key);
    }

    fn memory_changed(&mut self, view: &View) {
        self.used.clear();
        self.dma.retain(view.table());
    }

    fn pending(&self) -> usize {
        self.tasks.len()
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }

    fn wakes_by_edges(&self) -> bool {
        true
    }
}
