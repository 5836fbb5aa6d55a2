//! Splitting of a range of blocks into requests, several of them in flight.

use crate::buffers::{Buffer, BufferPool};
use crate::engine::Data;
use crate::error::BlockError;
use crate::in_flight::InFlight;
use crate::locks::RangeGuard;
use crate::queue::BlockQueue;
use shadowbell_disk::{Op, Request};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

/// Requests in flight of one long operation, oldest first. After a failure no further request is
/// started, but the operation waits for the requests in flight.
struct Window<'a> {
    requests: VecDeque<(u64, InFlight<'a>)>,
    limit: usize,
    /// First failure.
    outcome: Result<(), BlockError>,
}

impl<'a> Window<'a> {
    fn new(limit: usize) -> Self {
        Self { requests: VecDeque::with_capacity(limit), limit, outcome: Ok(()) }
    }

    /// True if another request may start.
    fn has_room(&self) -> bool {
        self.outcome.is_ok() && self.requests.len() < self.limit
    }

    /// Submits a request. `at` identifies it.
    async fn begin(&mut self, at: u64, request: Result<InFlight<'a>, BlockError>) {
        match request {
            Ok(mut request) => {
                request.submit().await;
                self.requests.push_back((at, request));
            }
            Err(error) => self.record(Err(error)),
        }
    }

    /// Waits for the oldest request; `None` if no request is in flight.
    async fn oldest(&mut self) -> Option<(u64, Result<Data, BlockError>)> {
        let (at, request) = self.requests.pop_front()?;
        Some((at, request.await))
    }

    /// Records the outcome, unless an earlier request has failed.
    fn record(&mut self, outcome: Result<(), BlockError>) {
        if self.outcome.is_ok() {
            self.outcome = outcome;
        }
    }
}

/// Takes a buffer for a request. Waits for a buffer only if the operation has no request in flight
/// (`first`). Otherwise, two operations that hold buffers and wait for more could deadlock.
async fn take_buffer(pool: &BufferPool, first: bool) -> Result<Option<Buffer>, BlockError> {
    match pool.take() {
        None if first => pool.wait().await.map(Some),
        buffer => Ok(buffer),
    }
}

/// Returns the buffer of a completed request.
pub(crate) fn buffer_of(data: Data) -> Result<Buffer, BlockError> {
    match data {
        Data::Buffer(buffer) => Ok(buffer),
        Data::Segments(_) => Err(BlockError::Buffer),
    }
}

/// Executes requests `op` (read or write) for the bytes from `start` to `end`, which are whole
/// blocks. `copy` copies the given number of bytes at the given offset: into the buffer before a
/// write, and from the buffer after a read.
///
/// Returns when no request is in flight, also after a failure.
pub(crate) async fn transfer(
    queue: &BlockQueue,
    op: Op,
    (start, end): (u64, u64),
    guard: Option<&Arc<RangeGuard>>,
    copy: &mut impl FnMut(u64, usize, &mut Buffer) -> Result<(), BlockError>,
) -> Result<(), BlockError> {
    let total = end.saturating_sub(start);
    let pool =
        if total <= queue.small().buffer_size() as u64 { queue.small() } else { queue.large() };
    let step = pool.buffer_size() as u64;
    if total <= step {
        // Fast path for a single request, without an allocation.
        if total == 0 {
            return Ok(());
        }
        let buffer = pool.wait().await?;
        let mut buffer = buffer_of(prepare(queue, op, (start, end), buffer, guard, copy)?.await?)?;
        return if op == Op::Read { copy(start, total as usize, &mut buffer) } else { Ok(()) };
    }
    let mut window = Window::new(queue.device().options.window.max(1));
    let mut next = start;
    loop {
        while window.has_room() && next < end {
            let first = window.requests.is_empty();
            let Some(buffer) = take_buffer(pool, first).await? else { break };
            let at = next;
            next = end.min(at + step);
            window.begin(at, prepare(queue, op, (at, next), buffer, guard, copy)).await;
        }
        let Some((at, outcome)) = window.oldest().await else { break };
        window.record(outcome.and_then(buffer_of).and_then(|mut buffer| {
            let len = (end.min(at + step) - at) as usize;
            if op == Op::Read { copy(at, len, &mut buffer) } else { Ok(()) }
        }));
    }
    window.outcome
}

/// Creates the request for the bytes from `at` to `end`, and fills its buffer for a write.
fn prepare<'a>(
    queue: &'a BlockQueue,
    op: Op,
    (at, end): (u64, u64),
    mut buffer: Buffer,
    guard: Option<&Arc<RangeGuard>>,
    copy: &mut impl FnMut(u64, usize, &mut Buffer) -> Result<(), BlockError>,
) -> Result<InFlight<'a>, BlockError> {
    if op != Op::Read {
        copy(at, (end - at) as usize, &mut buffer)?;
    }
    let request = Request { op, offset: at, len: end - at };
    Ok(queue.request(request, Data::Buffer(buffer), guard.cloned()))
}

/// Executes requests without data for the bytes from `start` to `end`, which are whole blocks.
///
/// Returns when no request is in flight, also after a failure.
pub(crate) async fn run_without_data(
    queue: &BlockQueue,
    op: Op,
    start: u64,
    end: u64,
    guard: &Arc<RangeGuard>,
) -> Result<(), BlockError> {
    let step = queue.longest_without_data();
    let mut window = Window::new(queue.device().options.window.max(1));
    let mut next = start;
    loop {
        while window.has_room() && next < end {
            let at = next;
            next = end.min(at.saturating_add(step));
            let request = Request { op, offset: at, len: next - at };
            window.begin(at, Ok(queue.request(request, Data::NONE, Some(Arc::clone(guard))))).await;
            if next < end {
                // The disk may execute this request immediately, on this thread. So other tasks of
                // the thread run first.
                yield_once().await;
            }
        }
        let Some((_, outcome)) = window.oldest().await else { break };
        window.record(outcome.map(drop));
    }
    window.outcome
}

/// Lets other tasks of the thread run once.
async fn yield_once() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
