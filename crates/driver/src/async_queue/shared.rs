//! State that futures share with the queue thread.

use crate::attached_controller::AttachedController;
use crate::command::{Command, Completion};
use crate::dma::{Buffer, BufferPool, DmaError};
use crate::error::{IoError, IoErrorKind, QueueError};
use crate::metadata::MetadataCommand;
use crate::queue::QueueStats;
use crate::queue_pair::QueuePair;
use parking_lot::{Mutex, MutexGuard};
use shadowbell_doorbell::Waker as SleeperWaker;
use shadowbell_memory::EventFd;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

/// State of one command, from the first poll of its future until its completion. There is one for
/// each slot of the queue.
pub(super) struct Op {
    pub(super) state: OpState,
    pub(super) waker: Option<Waker>,
    pub(super) deadline: Option<Instant>,
    pub(super) opcode: u8,
}

pub(super) enum OpState {
    /// Not in use.
    Free,
    /// The command is in the inbox.
    Queued(Command, Option<Buffer>),
    /// The command is in the inbox, but the future was dropped: the queue thread frees the [`Op`]
    /// when it reads the inbox.
    Cancelled,
    /// The command is in flight.
    Submitted,
    /// The command is in flight beyond its deadline: the future fails with a timeout.
    Expired,
    /// The command is in flight, and its future was dropped or has failed.
    Abandoned,
    /// The command has completed; the future takes the result.
    Completed(Result<Completion, IoError>),
}

/// A future that waits for a free [`Op`].
pub(super) struct Waiter {
    pub(super) ticket: u64,
    pub(super) waker: Waker,
    pub(super) deadline: Option<Instant>,
    /// True if the deadline has passed: the future fails with a timeout.
    pub(super) timed_out: bool,
}

pub(super) struct AsyncState {
    pub(super) ops: Box<[Op]>,
    pub(super) free: Vec<u32>,
    pub(super) inbox: VecDeque<u32>,
    /// Metadata part of commands in the inbox, by the index of their [`Op`].
    pub(super) with_metadata: BTreeMap<u32, MetadataCommand>,
    pub(super) waiters: VecDeque<Waiter>,
    pub(super) next_ticket: u64,
    pub(super) closing: bool,
    /// Cause of the failure, if the queue has failed.
    pub(super) failed: Option<QueueError>,
    pub(super) stats: QueueStats,
}

/// State shared by an [`AsyncQueue`](super::AsyncQueue), its futures and its queue thread.
pub(super) struct AsyncShared {
    state: Mutex<AsyncState>,
    /// True if the inbox has commands or the queue is to be closed. The queue thread polls the
    /// flag without the lock.
    inbox_flag: AtomicBool,
    sleeper: SleeperWaker<Arc<AtomicU32>>,
    event: EventFd,
    pub(super) capacity: usize,
    pub(super) timeout: Duration,
    controller: Weak<AttachedController>,
    pub(super) qid: u16,
}

impl AsyncShared {
    /// Creates the shared state of `queue`.
    pub(super) fn new(queue: &QueuePair, sleeping: &Arc<AtomicU32>) -> io::Result<Self> {
        let capacity = queue.capacity();
        let op = || Op { state: OpState::Free, waker: None, deadline: None, opcode: 0 };
        Ok(Self {
            state: Mutex::new(AsyncState {
                ops: (0..capacity).map(|_| op()).collect(),
                free: (0..capacity as u32).rev().collect(),
                inbox: VecDeque::with_capacity(capacity),
                with_metadata: BTreeMap::new(),
                waiters: VecDeque::new(),
                next_ticket: 0,
                closing: false,
                failed: None,
                stats: queue.stats(),
            }),
            inbox_flag: AtomicBool::new(false),
            sleeper: SleeperWaker::new(Arc::clone(sleeping)),
            event: queue.waker()?,
            capacity,
            timeout: queue.longest_command(),
            controller: Arc::downgrade(queue.controller()),
            qid: queue.qid(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, AsyncState> {
        self.state.lock()
    }

    #[inline]
    pub(super) fn has_inbox(&self) -> bool {
        self.inbox_flag.load(Ordering::Acquire)
    }

    /// Clears the inbox flag. Called with the lock held, before the inbox is read.
    pub(super) fn take_inbox_flag(&self) {
        self.inbox_flag.store(false, Ordering::Relaxed);
    }

    /// Notifies the queue thread of a new inbox entry. The caller holds the lock since it added
    /// the entry.
    pub(super) fn notify_inbox(&self) {
        // If the flag is set, the queue thread was already notified. That thread clears the flag
        // with the lock held, before it reads the inbox, so it will find the new entry.
        if !self.inbox_flag.load(Ordering::Acquire) {
            self.inbox_flag.store(true, Ordering::Release);
            self.wake_worker();
        }
    }

    /// Wakes the queue thread if it sleeps.
    fn wake_worker(&self) {
        if self.sleeper.kick() {
            self.event.signal();
        }
    }

    pub(super) fn close(&self) {
        self.lock().closing = true;
        self.notify_inbox();
    }

    /// Allocates buffers in memory that is shared with the controller.
    pub(super) fn pool(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        self.controller.upgrade().ok_or(DmaError::Detached)?.buffers(count, size)
    }

    pub(super) fn timed_out(&self, opcode: u8) -> IoError {
        let kind = IoErrorKind::TimedOut { opcode, waited: self.timeout };
        IoError { kind, buffer: None }
    }

    pub(super) fn queue_full(&self, opcode: u8, buffer: Option<Buffer>) -> IoError {
        IoError { kind: IoErrorKind::QueueFull { opcode, waited: self.timeout }, buffer }
    }
}

/// Wakers to call or drop after an [`Op`] was freed. The caller must not hold the lock when it
/// calls or drops them, because a waker may wake or drop another future of this queue.
#[must_use = "a future may wait for the free op"]
#[derive(Default)]
pub(super) struct FreedOp {
    pub(super) next: Option<Waker>,
    pub(super) stale: Option<Waker>,
}

impl FreedOp {
    /// Wakes the next waiter. Must be called without the lock.
    pub(super) fn wake_next(self) {
        drop(self.stale);
        if let Some(next) = self.next {
            next.wake();
        }
    }
}

impl AsyncState {
    pub(super) fn op(&mut self, index: u32) -> Option<&mut Op> {
        self.ops.get_mut(index as usize)
    }

    /// Frees an [`Op`]. Returns the waker of the next waiter.
    pub(super) fn free_op(&mut self, index: u32) -> FreedOp {
        let Some(op) = self.op(index) else { return FreedOp::default() };
        op.state = OpState::Free;
        let stale = op.waker.take();
        self.free.push(index);
        FreedOp { next: self.next_waiter(), stale }
    }

    /// Waker of the first waiter, if that waiter can continue: an [`Op`] is free, or the queue has
    /// failed.
    fn next_waiter(&self) -> Option<Waker> {
        if self.free.is_empty() && self.failed.is_none() {
            return None;
        }
        self.waiters.front().map(|waiter| waiter.waker.clone())
    }

    /// Removes the waiter with this ticket. Returns the waker of the next waiter.
    pub(super) fn remove_waiter(&mut self, ticket: Option<u64>) -> FreedOp {
        // The waiter is usually the first in the list.
        let at = self.waiters.iter().position(|waiter| Some(waiter.ticket) == ticket);
        let stale = at.and_then(|at| self.waiters.remove(at)).map(|waiter| waiter.waker);
        FreedOp { next: self.next_waiter(), stale }
    }

    /// Adds a waiter for an [`Op`], or updates the waker of the waiter with `ticket`. Returns the
    /// ticket, and the replaced waker, which the caller must drop without the lock. For the first
    /// waiter of an empty list, the caller must call [`notify_inbox`](AsyncShared::notify_inbox):
    /// the queue thread then checks the waiter's deadline.
    pub(super) fn wait(
        &mut self,
        ticket: Option<u64>,
        waker: Waker,
        timeout: Duration,
    ) -> (u64, Option<Waker>) {
        if let Some(waiter) = self.waiter(ticket) {
            return (waiter.ticket, Some(std::mem::replace(&mut waiter.waker, waker)));
        }
        let ticket = self.next_ticket;
        self.next_ticket = ticket.wrapping_add(1);
        let deadline = Instant::now().checked_add(timeout);
        self.waiters.push_back(Waiter { ticket, waker, deadline, timed_out: false });
        (ticket, None)
    }

    fn waiter(&mut self, ticket: Option<u64>) -> Option<&mut Waiter> {
        // The waiter is usually the first in the list.
        ticket.and_then(|ticket| self.waiters.iter_mut().find(|waiter| waiter.ticket == ticket))
    }

    /// True if the deadline of the waiter with this ticket has passed.
    pub(super) fn has_timed_out(&mut self, ticket: Option<u64>) -> bool {
        self.waiter(ticket).is_some_and(|waiter| waiter.timed_out)
    }
}
