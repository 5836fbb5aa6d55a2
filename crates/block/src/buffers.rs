//! Buffer pool with a FIFO queue of waiting requests.

use crate::error::BlockError;
use parking_lot::Mutex;
use shadowbell_driver::{Buffer, BufferPool};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// A driver's buffer pool, with a FIFO queue of requests that wait for a buffer.
pub(crate) struct Buffers {
    pool: BufferPool,
    state: Mutex<BuffersState>,
}

#[derive(Default)]
struct BuffersState {
    free: Vec<Buffer>,
    /// Number of leases, that is, of buffers in use.
    leases: usize,
    waiters: VecDeque<(u64, Waker)>,
    next: u64,
}

impl BuffersState {
    /// Waker of the first waiter, if it can continue: a buffer is free, or none can become free.
    fn next(&self) -> Option<Waker> {
        if self.free.is_empty() && self.leases != 0 {
            return None;
        }
        self.waiters.front().map(|(_, waker)| waker.clone())
    }

    fn leave(&mut self, ticket: Option<u64>) {
        if let Some(ticket) = ticket {
            self.waiters.retain(|(other, _)| *other != ticket);
        }
    }
}

impl Buffers {
    pub(crate) fn new(pool: BufferPool) -> Arc<Self> {
        let free = std::iter::from_fn(|| pool.take()).collect();
        Arc::new(Self { pool, state: Mutex::new(BuffersState { free, ..BuffersState::default() }) })
    }

    /// Size of each buffer in bytes.
    pub(crate) fn size(&self) -> usize {
        self.pool.buffer_size()
    }

    fn lease(self: &Arc<Self>, state: &mut BuffersState) -> Option<Lease> {
        // A buffer that a timed-out command kept returns to the driver's pool, not to `free`.
        let buffer = state.free.pop().or_else(|| self.pool.take())?;
        state.leases += 1;
        Some(Lease { buffers: Some(Arc::clone(self)), buffer: Some(buffer) })
    }

    /// Takes a buffer, if one is free and no request waits.
    pub(crate) fn try_take(self: &Arc<Self>) -> Option<Lease> {
        let mut state = self.state.lock();
        if state.waiters.is_empty() { self.lease(&mut state) } else { None }
    }

    /// Waits for a buffer. The place in the FIFO queue is taken at the first poll.
    pub(crate) fn take(self: &Arc<Self>) -> Take {
        Take { buffers: Arc::clone(self), ticket: None }
    }
}

/// Exclusive use of a buffer, until the lease is dropped.
pub(crate) struct Lease {
    /// Pool that the buffer returns to; `None` if the buffer belongs to the caller.
    buffers: Option<Arc<Buffers>>,
    /// `None` while a command owns the buffer.
    pub(crate) buffer: Option<Buffer>,
}

impl Lease {
    /// Wraps a buffer of the caller, which no request waits for.
    pub(crate) fn of(buffer: Buffer) -> Self {
        Self { buffers: None, buffer: Some(buffer) }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(buffers) = &self.buffers else { return };
        let mut state = buffers.state.lock();
        state.leases -= 1;
        state.free.extend(self.buffer.take());
        let next = state.next();
        drop(state);
        if let Some(next) = next {
            next.wake();
        }
    }
}

/// Future of [`Buffers::take`].
pub(crate) struct Take {
    buffers: Arc<Buffers>,
    ticket: Option<u64>,
}

impl Future for Take {
    type Output = Result<Lease, BlockError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let mut state = this.buffers.state.lock();
        let first = state.waiters.front().map(|(ticket, _)| *ticket);
        if first.is_none() || first == this.ticket {
            let outcome = match this.buffers.lease(&mut state) {
                Some(lease) => Some(Ok(lease)),
                // No buffer is in use, so none can be returned.
                None if state.leases == 0 => Some(Err(BlockError::BuffersLost)),
                None => None,
            };
            if let Some(outcome) = outcome {
                state.leave(this.ticket.take());
                let next = state.next();
                drop(state);
                if let Some(next) = next {
                    next.wake();
                }
                return Poll::Ready(outcome);
            }
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
        let mut state = self.buffers.state.lock();
        state.leave(Some(ticket));
        let next = state.next();
        drop(state);
        if let Some(next) = next {
            next.wake();
        }
    }
}
