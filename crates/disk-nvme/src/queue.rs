//! Queue of an I/O thread on the namespace, with a queue pair of its own.

use crate::dma_share::DmaShare;
use crate::shared::NvmeDiskShared;
use crate::task::{Next, Task, outcome};
use crate::transfer_stats::{QueueTransferStats, TransferStats};
use rustix::io::Errno;
use shadowbell_disk::{Bounds, DiskError, Orphan, Queue, Request, Submitted, Tasks};
use shadowbell_driver::{Buffer, BufferPool, Completion, QueuePair};
use shadowbell_memory::{AfterChange, EventFd, Segments, View, ViewChange};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::task::{Wake, Waker};

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
#[derive(Default)]
struct Subrequest {
    task: u32,
    at: u64,
    len: u64,
    /// True if the SSD accesses guest memory directly for this command.
    in_place: bool,
    /// True while the command is in flight for its task. A cancelled task does not wait for its
    /// commands.
    is_awaited: bool,
    /// Registration of a cancelled write among the orphans.
    orphan: Option<Orphan>,
}

impl Subrequest {
    fn is_awaited_by(&self, task: u32) -> bool {
        self.is_awaited && self.task == task
    }
}

/// Queue pair, with the state of its commands in flight.
pub(crate) struct PairState {
    pair: QueuePair,
    event: Arc<EventFd>,
    small: BufferPool,
    large: BufferPool,
    parts: Box<[Subrequest]>,
}

impl PairState {
    fn new(shared: &NvmeDiskShared, pair: QueuePair) -> io::Result<Self> {
        let event = Arc::new(pair.waker()?);
        let block = u64::from(shared.info.block_size);
        let max_len = shared.namespace.max_transfer_bytes().max(block);
        let buffers = |count, size: u64| {
            let pool = shared.controller.lock().buffers(count, size as usize);
            pool.map_err(io::Error::other)
        };
        let small = buffers(pair.capacity(), SMALL.min(max_len))?;
        let large = buffers(LARGE_COUNT, LARGE.min(max_len / block * block))?;
        let parts = (0..pair.capacity()).map(|_| Subrequest::default()).collect();
        Ok(Self { pair, event, small, large, parts })
    }

    /// True if the SSD accesses guest memory directly for a command of this task.
    fn has_direct(&self, task: u32) -> bool {
        self.parts.iter().any(|part| part.is_awaited_by(task) && part.in_place)
    }

    /// Takes the answers to commands for which no task waits, after the queue was closed. Returns
    /// true if there are none left.
    pub(crate) fn take_late_answers(&mut self) -> bool {
        while let Some(completion) = self.pair.pop() {
            if let Some(part) = self.parts.get_mut(completion.token.index()) {
                drop(std::mem::take(part));
            }
        }
        self.pair.outstanding() == 0 || self.pair.prepare_sleep().is_err()
    }
}

/// Waker of a queue, called when an orphan that a request waits for has ended.
struct QueueWaker(Arc<EventFd>);

impl Wake for QueueWaker {
    fn wake(self: Arc<Self>) {
        self.0.signal();
    }
}

/// Result of [`NvmeQueue::start`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Start {
    /// All commands were submitted, or the task has failed.
    Complete,
    /// The task waits for a free entry of the queue pair or for a buffer.
    Waits,
    /// The task waits for an orphan.
    Blocked,
}

pub(crate) struct NvmeQueue {
    shared: Arc<NvmeDiskShared>,
    bounds: Bounds,
    /// `None` only while the value is dropped.
    state: Option<PairState>,
    event: Arc<EventFd>,
    waker: Waker,
    /// Value of `Orphans::ended` when blocked requests were last checked.
    orphans_ended: u64,
    dma: DmaShare,
    /// Driver buffers of ended zero-copy commands, kept for later commands to save allocations.
    used: Vec<Buffer>,
    /// Requests that have not ended. Those in the waiting list have commands that are not submitted
    /// yet.
    tasks: Tasks<Task>,
    /// True after the SSD was removed or disconnected.
    disconnected: bool,
    transfers: TransferStats,
    published: Arc<QueueTransferStats>,
}

impl NvmeQueue {
    pub(crate) fn new(shared: Arc<NvmeDiskShared>, pair: QueuePair) -> io::Result<Self> {
        let state = PairState::new(&shared, pair)?;
        Ok(Self::with(shared, state))
    }

    /// Creates a queue on the queue pair of a closed one, which may have commands in flight for
    /// which no request waits.
    pub(crate) fn with(shared: Arc<NvmeDiskShared>, state: PairState) -> Self {
        let event = Arc::clone(&state.event);
        shared.disconnect.add(&event);
        Self {
            bounds: shared.info.bounds(),
            state: Some(state),
            waker: Waker::from(Arc::new(QueueWaker(Arc::clone(&event)))),
            event,
            orphans_ended: shared.orphans.ended(),
            dma: DmaShare::new(shared.shares.clone()),
            used: Vec::new(),
            tasks: Tasks::default(),
            disconnected: false,
            transfers: TransferStats::default(),
            published: shared.transfers.join(),
            shared,
        }
    }

    /// Submits the remaining commands of a task, as far as possible.
    fn start(&mut self, key: u32) -> Start {
        let Self { shared, state: Some(state), waker, dma, used, tasks, transfers, .. } = self
        else {
            return Start::Complete;
        };
        let PairState { pair, small, large, parts, .. } = state;
        let (small, large) = (&*small, &*large);
        let namespace = &shared.namespace;
        let size = namespace.block_size();
        let Some(task) = tasks.get_mut(key) else { return Start::Complete };
        loop {
            let next = task.next();
            if next == Next::Nothing {
                return Start::Complete;
            }
            if shared.orphans.blocks(&task.rest(), waker) {
                return Start::Blocked;
            }
            if pair.outstanding() >= pair.capacity() {
                return Start::Waits;
            }
            let (len, own) = match next {
                Next::Nothing => return Start::Complete,
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
                let Some(mut taken) = pool.take() else { return Start::Waits };
                if let Err(error) = task.fill(&mut taken, len, size) {
                    task.outcome = Err(error);
                    return Start::Complete;
                }
                buffer = Some(taken);
            }
            let (command, len) = match task.command(namespace, len) {
                Ok(command) => command,
                Err(error) => {
                    task.outcome = Err(error);
                    return Start::Complete;
                }
            };
            match pair.submit(command, buffer) {
                Ok(token) => {
                    let at = task.began(len);
                    transfers.in_place += u64::from(in_place);
                    transfers.copied += u64::from(!in_place && matches!(next, Next::Data { .. }));
                    if let Some(part) = parts.get_mut(token.index()) {
                        let (is_awaited, orphan) = (true, None);
                        *part = Subrequest { task: key, at, len, in_place, is_awaited, orphan };
                    }
                }
                Err(refused) => {
                    tracing::debug!("{}: {}", shared.name, refused.reason);
                    task.outcome = Err(DiskError::Io(Errno::IO.raw_os_error()));
                    return Start::Complete;
                }
            }
        }
    }

    fn start_waiting(&mut self) {
        if self.tasks.has_blocked() {
            let ended = self.shared.orphans.ended();
            if std::mem::replace(&mut self.orphans_ended, ended) != ended {
                self.tasks.unblock_all();
            }
        }
        while let Some(key) = self.tasks.first_waiting() {
            match self.start(key) {
                Start::Waits => return,
                Start::Blocked => self.tasks.block(key),
                Start::Complete => {
                    self.tasks.stop_waiting(key);
                    self.check_finished(key);
                }
            }
        }
    }

    /// Submits waiting commands, and prepares the sleep of the I/O thread: writes the doorbell,
    /// enables interrupts, and arms the command timeouts.
    fn advance(&mut self) {
        self.start_waiting();
        self.published.publish(self.transfers);
        let Some(state) = &mut self.state else { return };
        if let Err(error) = state.pair.prepare_sleep() {
            self.fail(&error);
            self.event.signal();
        }
    }

    /// Ends a request early with `error`. The data of its reads in flight are ignored, and its
    /// writes in flight become orphans. If there are too many orphans, or if the SSD accesses guest
    /// memory directly, the request ends only after its commands in flight.
    fn end_early(&mut self, key: u32, error: DiskError) {
        let Self { shared, state: Some(state), tasks, .. } = self else { return };
        let Some(task) = tasks.get_mut(key) else { return };
        let has_direct = state.has_direct(key);
        let mut released = 0;
        let parts = state.parts.iter_mut().filter(|part| part.is_awaited_by(key));
        for part in parts.filter(|_| !has_direct) {
            if let Some((offset, len)) = task.changes(part.at, part.len) {
                part.orphan = shared.orphans.adopt(offset, len);
                if part.orphan.is_none() {
                    continue;
                }
            }
            part.is_awaited = false;
            released += 1;
        }
        if released == 0 && task.next() == Next::Nothing {
            return;
        }
        task.release(released);
        task.outcome = task.outcome.and(Err(error));
        self.tasks.wait_first(key);
        self.tasks.stop_waiting(key);
        self.check_finished(key);
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
        let parts = &mut self.state.as_mut()?.parts;
        let part = std::mem::take(parts.get_mut(token.index())?);
        let kept = parts.len();
        if !part.is_awaited {
            return None;
        }
        let task = self.tasks.get_mut(part.task)?;
        let mut outcome = outcome(status);
        if part.in_place {
            // The number of buffers for reuse is limited to the number of commands that can be in
            // flight.
            if let Some(buffer) = buffer
                && self.used.len() < kept
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
        let has_waiting = self.tasks.first_waiting().is_some();
        match if has_waiting { Start::Waits } else { self.start(key) } {
            Start::Waits => self.tasks.wait(key),
            Start::Blocked => self.tasks.block(key),
            Start::Complete => self.check_finished(key),
        }
        Submitted::Pending
    }

    fn commit(&mut self) {
        if self.disconnected {
            return;
        }
        // The I/O thread may sleep after this call.
        self.advance();
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        if self.tasks.has_blocked() && !self.disconnected {
            self.advance();
        }
        while !self.disconnected
            && let Some(state) = &self.state
        {
            let mut any = false;
            for _ in 0..state.parts.len() {
                let Some(state) = &mut self.state else { break };
                let Some(completion) = state.pair.pop() else { break };
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
            // This enables interrupts, and then the loop polls the queue once more. In the other
            // order, a completion that arrives in between would wake no thread.
            self.advance();
            fence(Ordering::SeqCst);
        }
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
        self.used.clear();
        self.dma.retain(view.table());
        let mut change = ViewChange::new(view);
        let keys: Vec<_> = self.tasks.keys().collect();
        for key in keys {
            // The SSD accesses the memory until the command has ended.
            if self.state.as_ref().is_some_and(|state| state.has_direct(key)) {
                continue;
            }
            let Some(task) = self.tasks.get_mut(key) else { continue };
            task.release_copied_data();
            if task.data.move_to(&mut change) == AfterChange::Unmapped {
                self.end_early(key, DiskError::BadBuffer);
            }
        }
    }

    /// Includes one for the commands of cancelled requests, so that their answers are taken.
    fn pending(&self) -> usize {
        let has_commands = self.state.as_ref().is_some_and(|state| state.pair.outstanding() != 0);
        self.tasks.len().max(usize::from(has_commands && !self.disconnected))
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }

    fn wakes_by_edges(&self) -> bool {
        true
    }
}

impl Drop for NvmeQueue {
    /// Keeps the queue pair open while commands of cancelled requests are in flight: closing it
    /// would wait for them.
    fn drop(&mut self) {
        let Some(state) = self.state.take() else { return };
        let is_direct = state.parts.iter().any(|part| part.is_awaited && part.in_place);
        if state.pair.outstanding() != 0 && !is_direct && !self.disconnected {
            NvmeDiskShared::keep(&self.shared, state);
        }
    }
}
