//! Buffer pools of a queue. If no buffer is free, requests wait in FIFO order.

use crate::error::BlockError;
use shadowbell_memory::{MapError, Mapping, Segments, SharedBytes};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Page size. Buffers are aligned to pages, as direct I/O requires.
const PAGE: usize = 4096;

/// Fixed number of buffers of one size, for the thread that created the pool. A clone is another
/// handle to the same pool.
///
/// The memory is a memfd, because a disk that is a namespace of another controller passes the
/// descriptor to that controller. The kernel allocates the pages on first use.
#[derive(Clone)]
pub struct BufferPool(Rc<Pool>);

struct Pool {
    size: usize,
    state: RefCell<PoolState>,
}

#[derive(Default)]
struct PoolState {
    free: Vec<Memory>,
    waiters: VecDeque<(u64, Waker)>,
    next: u64,
}

/// Memory of a buffer, and the list of segments that describes it to a disk.
struct Memory {
    bytes: SharedBytes,
    segments: Segments,
}

impl PoolState {
    /// Waker of the first waiter, if a buffer is free.
    fn next(&self) -> Option<Waker> {
        if self.free.is_empty() {
            return None;
        }
        self.waiters.front().map(|(_, waker)| waker.clone())
    }

    fn cancel_wait(&mut self, ticket: Option<u64>) {
        if let Some(ticket) = ticket {
            self.waiters.retain(|(other, _)| *other != ticket);
        }
    }
}

impl BufferPool {
    /// Allocates `count` buffers of `size` bytes, both at least one.
    pub(crate) fn new(count: usize, size: usize) -> Result<Self, MapError> {
        let (count, size) = (count.max(1), size.max(1));
        let stride = size.next_multiple_of(PAGE);
        let len = stride.saturating_mul(count) as u64;
        let bytes = Mapping::shared("shadowbell-block", len)?.bytes();
        // The order is reversed, so that `pop` takes the first buffer first.
        let slices = (0..count).rev().filter_map(|nth| bytes.slice(nth * stride, size));
        let free = slices.map(|bytes| Memory { segments: Segments::from_bytes(&bytes), bytes });
        let state = PoolState { free: free.collect(), ..PoolState::default() };
        Ok(Self(Rc::new(Pool { size, state: RefCell::new(state) })))
    }

    /// Size of each buffer in bytes.
    #[must_use]
    pub fn buffer_size(&self) -> usize {
        self.0.size
    }

    /// Number of free buffers.
    #[must_use]
    pub fn available(&self) -> usize {
        self.0.state.borrow().free.len()
    }

    fn pop(&self, state: &mut PoolState) -> Option<Buffer> {
        let memory = state.free.pop()?;
        Some(Buffer { pool: self.clone(), memory: Some(memory) })
    }

    /// Takes a buffer, if one is free and no request waits for a buffer.
    #[must_use]
    pub fn take(&self) -> Option<Buffer> {
        let mut state = self.0.state.borrow_mut();
        if state.waiters.is_empty() { self.pop(&mut state) } else { None }
    }

    /// Waits for a buffer. The future joins the FIFO of waiting requests when it is first polled.
    pub(crate) fn wait(&self) -> Take {
        Take { pool: self.clone(), ticket: None }
    }
}

/// Exclusive use of a buffer, until the value is dropped.
pub struct Buffer {
    pool: BufferPool,
    /// `None` only while the value is dropped.
    memory: Option<Memory>,
}

impl Buffer {
    /// Length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.pool.0.size
    }

    /// Always false: a buffer has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Memory of the buffer. `None` only while the buffer is dropped.
    #[must_use]
    pub fn bytes(&self) -> Option<&SharedBytes> {
        self.memory.as_ref().map(|memory| &memory.bytes)
    }

    /// Copies `from` into the buffer, from byte `offset` on. Returns false and copies nothing if
    /// `from` does not fit.
    #[must_use]
    pub fn copy_from(&mut self, offset: usize, from: &[u8]) -> bool {
        self.bytes().and_then(|bytes| bytes.write_from(offset, from)).is_some()
    }

    /// Fills `into` with the bytes of the buffer from `offset` on. Returns false if the buffer is
    /// too short.
    #[must_use]
    pub fn copy_to(&self, offset: usize, into: &mut [u8]) -> bool {
        self.bytes().and_then(|bytes| bytes.read_into(offset, into)).is_some()
    }

    /// Sets every byte of the buffer to `byte`.
    pub fn fill(&mut self, byte: u8) {
        let len = self.len();
        let _ = self.bytes().and_then(|bytes| bytes.fill(0, len, byte));
    }

    /// Returns a copy of the first `len` bytes.
    #[must_use]
    pub fn to_vec(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        if self.copy_to(0, &mut bytes) { bytes } else { Vec::new() }
    }

    /// Segments that describe the buffer to a disk. They are empty while a request is in flight,
    /// because the disk's queue owns them.
    pub(crate) fn segments(&mut self) -> Option<&mut Segments> {
        self.memory.as_mut().map(|memory| &mut memory.segments)
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, available) = (self.0.size, self.available());
        f.debug_struct("BufferPool").field("size", &size).field("available", &available).finish()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut state = self.pool.0.state.borrow_mut();
        state.free.extend(self.memory.take());
        let next = state.next();
        drop(state);
        if let Some(next) = next {
            next.wake();
        }
    }
}

/// Future of [`BufferPool::wait`].
pub(crate) struct Take {
    pool: BufferPool,
    ticket: Option<u64>,
}

impl Future for Take {
    type Output = Result<Buffer, BlockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut state = this.pool.0.state.borrow_mut();
        let first = state.waiters.front().map(|(ticket, _)| *ticket);
        if (first.is_none() || first == this.ticket)
            && let Some(buffer) = this.pool.pop(&mut state)
        {
            state.cancel_wait(this.ticket.take());
            let next = state.next();
            drop(state);
            if let Some(next) = next {
                next.wake();
            }
            return Poll::Ready(Ok(buffer));
        }
        let waker = context.waker().clone();
        let known = this
            .ticket
            .and_then(|ticket| state.waiters.iter_mut().find(|(other, _)| *other == ticket));
        let stale = match known {
            Some((_, old)) => Some(std::mem::replace(old, waker)),
            None => {
                let ticket = state.next;
                state.next += 1;
                state.waiters.push_back((ticket, waker));
                this.ticket = Some(ticket);
                None
            }
        };
        drop(state);
        drop(stale);
        Poll::Pending
    }
}

impl Drop for Take {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.pool.0.state.borrow_mut();
        state.cancel_wait(Some(ticket));
        let next = state.next();
        drop(state);
        if let Some(next) = next {
            next.wake();
        }
    }
}
