//! Queue thread of an async queue, and its handle: submits commands, completes futures, checks
//! deadlines.

use super::shared::{AsyncShared, FreedOp, OpState};
use crate::command::{Command, Completion, TagSource, Token};
use crate::dma::{Buffer, BufferPool, DmaError};
use crate::error::{IoError, IoErrorKind, QueueError, Refused};
use crate::queue_pair::QueuePair;
use shadowbell_doorbell::Sleeper;
use shadowbell_memory::{AbortOnPanic, MapError};
use shadowbell_spec::nvm::CopyRange;
use std::io;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Poll interval while commands are outstanding on a queue without an interrupt.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Number of polls between two readings of the clock.
const POLLS_PER_CLOCK_READ: u32 = 64;

pub(super) struct Worker {
    queue: QueuePair,
    sleeper: Sleeper<Arc<AtomicU32>>,
    /// For each slot of the queue, the index of the `Op` whose command is in the slot.
    op_of_slot: Box<[u32]>,
    // Vectors that are reused, so that a batch allocates no memory.
    batch: Vec<(u32, Command, Option<Buffer>)>,
    done: Vec<(u32, Result<Completion, IoError>)>,
    wakers: Vec<Waker>,
    dropped: Vec<Result<Completion, IoError>>,
    freed: Vec<FreedOp>,
    next_scan: Option<Instant>,
    /// Time when the queue thread noticed that the queue is to be closed.
    closing: Option<Instant>,
    /// Time when the last spin began. `None` if that spin found work, so that no sleep follows it.
    waiting: Option<Instant>,
    /// True if futures waited for a free `Op` at the last check.
    waiters: bool,
    /// True if the queue has failed, and with it every future.
    failed: bool,
}

impl Worker {
    pub(super) fn new(queue: QueuePair, sleeping: Arc<AtomicU32>) -> Self {
        let capacity = queue.capacity();
        Self {
            queue,
            sleeper: Sleeper::new(sleeping),
            op_of_slot: vec![0; capacity].into(),
            batch: Vec::with_capacity(capacity),
            done: Vec::with_capacity(capacity),
            wakers: Vec::with_capacity(capacity),
            dropped: Vec::new(),
            freed: Vec::new(),
            next_scan: None,
            closing: None,
            waiting: None,
            waiters: false,
            failed: false,
        }
    }

    /// True if the queue has failed, or if it is being closed and its outstanding commands have
    /// completed or timed out.
    pub(super) fn is_over(&self, shared: &AsyncShared) -> bool {
        self.failed
            || self.closing.is_some_and(|since| {
                self.queue.outstanding() == 0 || since.elapsed() >= shared.timeout
            })
    }

    /// Submits the commands of the inbox, and completes futures. Returns true if there was work.
    pub(super) fn step(&mut self, shared: &AsyncShared) -> bool {
        if self.failed {
            return false;
        }
        self.try_step(shared).unwrap_or_else(|error| self.fail(shared, error))
    }

    fn try_step(&mut self, shared: &AsyncShared) -> Result<bool, QueueError> {
        let mut busy = false;
        if shared.has_inbox() {
            busy |= self.take_inbox(shared);
            self.submit(shared)?;
        }
        while self.done.len() < self.queue.capacity()
            && let Some(completion) = self.queue.pop()
        {
            let index = self.op_of_slot.get(completion.token.index()).copied();
            self.done.push((index.unwrap_or(u32::MAX), Ok(completion)));
        }
        self.queue.ring_cq_doorbell_if_needed()?;
        busy |= !self.done.is_empty();
        self.complete(shared);
        self.expire(shared);
        Ok(busy)
    }

    fn take_inbox(&mut self, shared: &AsyncShared) -> bool {
        let now = Instant::now();
        let deadline = now.checked_add(shared.timeout);
        let mut state = shared.lock();
        shared.take_inbox_flag();
        if state.closing && self.closing.is_none() {
            self.closing = Some(now);
        }
        while let Some(index) = state.inbox.pop_front() {
            let Some(op) = state.op(index) else { continue };
            match std::mem::replace(&mut op.state, OpState::Submitted) {
                OpState::Queued(command, buffer) => {
                    op.deadline = deadline;
                    self.batch.push((index, command, buffer));
                }
                // The future was dropped before its command was taken from the inbox.
                _ => self.freed.push(state.free_op(index)),
            }
        }
        self.waiters = !state.waiters.is_empty();
        if self.next_scan.is_none() && (self.waiters || !self.batch.is_empty()) {
            self.next_scan = now.checked_add(scan_interval(shared));
        }
        drop(state);
        let any = !self.batch.is_empty() || !self.freed.is_empty();
        self.freed.drain(..).for_each(FreedOp::wake_next);
        any
    }

    fn submit(&mut self, shared: &AsyncShared) -> Result<(), QueueError> {
        if self.batch.is_empty() {
            return Ok(());
        }
        for (index, command, buffer) in self.batch.drain(..) {
            let outcome = match self.queue.submit(command, buffer) {
                Err(Refused { buffer, .. }) if command.tag_source() == TagSource::Given => {
                    // `submit` refuses a command whose metadata is in `with_metadata`. Only refused
                    // commands are looked up in `with_metadata`, so other commands do not pay for
                    // the lookup.
                    submit_op_with_metadata(&mut self.queue, shared, index, buffer)
                }
                outcome => outcome,
            };
            match outcome {
                Ok(token) => {
                    if let Some(slot) = self.op_of_slot.get_mut(token.index()) {
                        *slot = index;
                    }
                }
                Err(refused) => {
                    let kind = IoErrorKind::Queue(refused.reason);
                    self.done.push((index, Err(IoError { kind, buffer: refused.buffer })));
                }
            }
        }
        self.queue.ring()
    }

    fn complete(&mut self, shared: &AsyncShared) {
        if self.done.is_empty() {
            return;
        }
        let mut state = shared.lock();
        for (index, outcome) in self.done.drain(..) {
            let Some(op) = state.op(index) else { continue };
            op.deadline = None;
            match op.state {
                OpState::Submitted | OpState::Expired => {
                    op.state = OpState::Completed(outcome);
                    self.wakers.extend(op.waker.take());
                }
                // The future was dropped or has failed. Its buffer is dropped after the unlock.
                _ => {
                    self.freed.push(state.free_op(index));
                    self.dropped.push(outcome);
                }
            }
        }
        drop(state);
        self.dropped.clear();
        self.freed.drain(..).for_each(FreedOp::wake_next);
        self.wakers.drain(..).for_each(Waker::wake);
    }

    /// Fails futures whose commands are in flight beyond their deadline, and futures that waited
    /// too long for a free `Op`.
    fn expire(&mut self, shared: &AsyncShared) {
        let Some(scan) = self.next_scan else { return };
        if self.queue.outstanding() == 0 && !self.waiters {
            self.next_scan = None;
            return;
        }
        let now = Instant::now();
        if now < scan {
            return;
        }
        let mut state = shared.lock();
        self.waiters = !state.waiters.is_empty();
        self.next_scan = now.checked_add(scan_interval(shared));
        for op in &mut state.ops {
            if matches!(op.state, OpState::Submitted) && op.deadline.is_some_and(|d| d <= now) {
                op.state = OpState::Expired;
                self.wakers.extend(op.waker.take());
            }
        }
        let expired = self.wakers.len();
        for waiter in &mut state.waiters {
            if !waiter.timed_out && waiter.deadline.is_some_and(|deadline| deadline <= now) {
                waiter.timed_out = true;
                self.wakers.push(waiter.waker.clone());
            }
        }
        drop(state);
        if !self.wakers.is_empty() {
            tracing::warn!(
                qid = shared.qid,
                "{expired} commands were not completed within {:?}, and {} were not submitted",
                shared.timeout,
                self.wakers.len() - expired
            );
        }
        self.wakers.drain(..).for_each(Waker::wake);
    }

    /// Polls within the limit of the spin policy. Returns true if there is work for the queue.
    pub(super) fn spin(&mut self, shared: &AsyncShared) -> bool {
        let began = Instant::now();
        let window = self.queue.spin_mut().window();
        loop {
            for _ in 0..POLLS_PER_CLOCK_READ {
                if self.queue.is_ready() || shared.has_inbox() {
                    self.waiting = None;
                    self.queue.spin_mut().waited(began.elapsed());
                    return true;
                }
                std::hint::spin_loop();
            }
            if began.elapsed() >= window {
                self.waiting = Some(began);
                return false;
            }
        }
    }

    /// Sleeps until there is work.
    pub(super) fn sleep(&mut self, shared: &AsyncShared) {
        shared.lock().stats = self.queue.stats();
        if let Err(error) = self.queue.prepare_sleep() {
            self.fail(shared, error);
        }
        let mut fenced = self.sleeper.prepare().fence();
        fenced.note(self.failed || shared.has_inbox() || self.queue.is_ready());
        let asleep = fenced.try_sleep();
        let outcome = asleep.as_ref().map_or(Ok(()), |_| {
            let until = if self.queue.outstanding() == 0 || self.queue.has_interrupt() {
                // Deadlines have to be checked only for outstanding commands and for waiters.
                self.next_scan.filter(|_| self.waiters || self.queue.outstanding() != 0)
            } else {
                Instant::now().checked_add(POLL_INTERVAL)
            };
            self.queue.block(until)
        });
        drop(asleep);
        if let Err(error) = outcome {
            self.fail(shared, error);
        }
        // The spin found no work, so the wait was a spin and a sleep. The spin policy adapts later
        // spins to the duration of both.
        if let Some(began) = self.waiting.take() {
            self.queue.spin_mut().waited(began.elapsed());
        }
    }

    /// Fails the queue and all futures. Commands that were not submitted return their buffers.
    fn fail(&mut self, shared: &AsyncShared, error: QueueError) -> bool {
        self.failed = true;
        let mut state = shared.lock();
        state.stats = self.queue.stats();
        state.failed = Some(error.clone());
        for (index, _, buffer) in self.batch.drain(..) {
            if let Some(op) = state.op(index) {
                let kind = IoErrorKind::Queue(error.clone());
                op.state = OpState::Completed(Err(IoError { kind, buffer }));
            }
        }
        for op in &mut state.ops {
            self.wakers.extend(op.waker.take());
        }
        state.inbox.clear();
        // The first waiter is woken below. Each waiter that fails wakes the next one.
        let freed = state.remove_waiter(None);
        drop(state);
        self.complete(shared);
        self.wakers.drain(..).for_each(Waker::wake);
        freed.wake_next();
        true
    }

    /// Ends the queue. Futures that are polled later fail.
    pub(super) fn shut_down(self, shared: &AsyncShared) {
        let mut state = shared.lock();
        state.stats = self.queue.stats();
        state.failed.get_or_insert(QueueError::Detached { qid: shared.qid });
        let freed = state.remove_waiter(None);
        drop(state);
        freed.wake_next();
        // The drop of `self` also drops the queue pair, and so deletes the queue pair in the
        // controller.
    }
}

/// Submits the command with metadata whose state is the `Op` with this index.
#[cold]
fn submit_op_with_metadata(
    queue: &mut QueuePair,
    shared: &AsyncShared,
    index: u32,
    buffer: Option<Buffer>,
) -> Result<Token, Refused> {
    match shared.lock().with_metadata.remove(&index) {
        Some(command) => queue.submit_with_metadata(&command, buffer),
        // This case is unreachable: the metadata are stored before the index is put into the inbox.
        None => Err(Refused { reason: QueueError::Detached { qid: shared.qid }, buffer }),
    }
}

fn scan_interval(shared: &AsyncShared) -> Duration {
    shared.timeout / 8
}

pub(super) fn spawn(worker: Worker, shared: Arc<AsyncShared>) -> io::Result<JoinHandle<()>> {
    let name = format!("shadowbell-q{}", shared.qid);
    std::thread::Builder::new().name(name).spawn(move || {
        let _guard = AbortOnPanic::new();
        run(worker, &shared);
    })
}

fn run(mut worker: Worker, shared: &AsyncShared) {
    loop {
        let busy = worker.step(shared);
        if worker.is_over(shared) {
            return worker.shut_down(shared);
        }
        if !busy && !worker.spin(shared) {
            worker.sleep(shared);
        }
    }
}

/// Number of pooled buffers for the ranges of Dataset Management and Copy commands.
const RANGE_BUFFERS: usize = 8;
/// Size of each range buffer in bytes: 256 source ranges of Copy. The ranges of Dataset Management
/// are shorter.
const RANGE_BYTES: usize = 256 * size_of::<CopyRange>();

/// An async queue with its queue thread. Dropping the last reference closes the queue.
pub(super) struct AsyncHandle {
    shared: Arc<AsyncShared>,
    thread: Option<JoinHandle<()>>,
    ranges: OnceLock<BufferPool>,
}

impl AsyncHandle {
    /// Starts the queue thread of `queue`.
    pub(super) fn start(queue: QueuePair) -> io::Result<Self> {
        let sleeping = Arc::new(AtomicU32::new(0));
        let shared = Arc::new(AsyncShared::new(&queue, &sleeping)?);
        let thread = spawn(Worker::new(queue, sleeping), Arc::clone(&shared))?;
        Ok(Self { shared, thread: Some(thread), ranges: OnceLock::new() })
    }

    pub(super) fn shared(&self) -> &AsyncShared {
        &self.shared
    }

    /// Takes a buffer for `len` bytes of ranges.
    pub(super) fn range_buffer(&self, len: usize) -> Result<Buffer, DmaError> {
        let make = |count| self.shared().pool(count, len.max(RANGE_BYTES));
        let pool = match self.ranges.get() {
            Some(pool) => pool,
            None => {
                let pool = make(RANGE_BUFFERS)?;
                self.ranges.get_or_init(|| pool)
            }
        };
        if let Some(buffer) = pool.take() {
            return Ok(buffer);
        }
        // `take` cannot fail: a new pool has a free buffer.
        make(1)?.take().ok_or(DmaError::Map(MapError::Shape {
            len: len as u64,
            offset: 0,
            why: "the pool has no buffer",
        }))
    }
}

impl Drop for AsyncHandle {
    fn drop(&mut self) {
        self.shared().close();
        // A waker that runs on the queue thread may drop the last handle. In this case, the current
        // thread is the queue thread, which cannot join itself.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}
