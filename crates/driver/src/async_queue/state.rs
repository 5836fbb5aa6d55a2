//! What futures and the queue's thread share.

use crate::command::Command;
use crate::dma::{Buffer, BufferPool, DmaError};
use crate::error::{IoError, IoErrorKind, QueueError};
use crate::queue::{Completion, QueuePair, QueueStats};
use crate::shared::Shared;
use doorbell::{Sleeper, Waker as Kick};
use memory::EventFd;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

/// A place for one command, from the first poll of its future until its completion.
pub(super) struct Op {
    pub(super) state: OpState,
    pub(super) waker: Option<Waker>,
    pub(super) deadline: Option<Instant>,
    pub(super) opcode: u8,
}

pub(super) enum OpState {
    /// Nobody's.
    Free,
    /// In the inbox.
    Queued(Command, Option<Buffer>),
    /// In the inbox, but the future is gone: to be freed from there.
    Cancelled,
    /// With the controller.
    Submitted,
    /// With the controller for too long: the future is to be told.
    Expired,
    /// With the controller, and nobody waits any more.
    Abandoned,
    /// For the future to take.
    Done(Result<Completion, IoError>),
}

/// A future that waits for a place.
pub(super) struct Waiter {
    pub(super) ticket: u64,
    pub(super) waker: Waker,
}

pub(super) struct State {
    pub(super) ops: Box<[Op]>,
    pub(super) free: Vec<u32>,
    pub(super) inbox: VecDeque<u32>,
    pub(super) waiters: VecDeque<Waiter>,
    pub(super) next_ticket: u64,
    pub(super) closing: bool,
    /// The queue does not work any more, and its thread has ended.
    pub(super) failed: Option<QueueError>,
    pub(super) stats: QueueStats,
}

pub(crate) struct Inner {
    state: Mutex<State>,
    /// Whether there is something in the inbox, or the queue is to be closed: for the thread to
    /// look at without the lock.
    news: AtomicBool,
    kick: Kick<Arc<AtomicU32>>,
    sleeping: Arc<AtomicU32>,
    event: EventFd,
    pub(super) capacity: usize,
    pub(super) timeout: Duration,
    shared: Weak<Shared>,
    pub(super) qid: u16,
}

impl Inner {
    pub(super) fn new(queue: &QueuePair) -> io::Result<Self> {
        let capacity = queue.capacity();
        let op = || Op { state: OpState::Free, waker: None, deadline: None, opcode: 0 };
        let sleeping = Arc::new(AtomicU32::new(0));
        Ok(Self {
            state: Mutex::new(State {
                ops: (0..capacity).map(|_| op()).collect(),
                free: (0..capacity as u32).rev().collect(),
                inbox: VecDeque::with_capacity(capacity),
                waiters: VecDeque::new(),
                next_ticket: 0,
                closing: false,
                failed: None,
                stats: queue.stats(),
            }),
            news: AtomicBool::new(false),
            kick: Kick::new(Arc::clone(&sleeping)),
            sleeping,
            event: queue.waker()?,
            capacity,
            timeout: queue.shared().device.timeouts.io,
            shared: Arc::downgrade(queue.shared()),
            qid: queue.qid(),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread's end of going to sleep.
    pub(super) fn sleeper(&self) -> Sleeper<Arc<AtomicU32>> {
        Sleeper::new(Arc::clone(&self.sleeping))
    }

    #[inline]
    pub(super) fn has_news(&self) -> bool {
        self.news.load(Ordering::Acquire)
    }

    /// To be called with the lock held, before the inbox is looked at.
    pub(super) fn take_news(&self) {
        self.news.store(false, Ordering::Relaxed);
    }

    /// Something is in the inbox, put there with the lock held.
    pub(super) fn announce(&self) {
        self.news.store(true, Ordering::Release);
        if self.kick.kick() {
            self.event.signal();
        }
    }

    pub(super) fn close(&self) {
        self.lock().closing = true;
        self.announce();
    }

    /// Buffers that the device can reach.
    pub(super) fn pool(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        let Some(shared) = self.shared.upgrade() else {
            return Err(DmaError::Detached);
        };
        let page = shared.device.page as usize;
        BufferPool::new(&shared.device.transport, count, size, page)
    }

    pub(super) fn timed_out(&self, opcode: u8) -> IoError {
        let kind = IoErrorKind::TimedOut { opcode, waited: self.timeout };
        IoError { kind, buffer: None }
    }
}

/// What is left to do after a place was freed, without the lock: a waker's own code may come back
/// here, to wake somebody or to drop a future.
#[must_use = "somebody may wait for the place"]
#[derive(Default)]
pub(super) struct Freed {
    pub(super) next: Option<Waker>,
    pub(super) stale: Option<Waker>,
}

impl Freed {
    /// Wakes who is next. Not with the lock held.
    pub(super) fn pass_on(self) {
        drop(self.stale);
        if let Some(next) = self.next {
            next.wake();
        }
    }
}

impl State {
    pub(super) fn op(&mut self, index: u32) -> Option<&mut Op> {
        self.ops.get_mut(index as usize)
    }

    /// Frees a place.
    pub(super) fn release(&mut self, index: u32) -> Freed {
        let Some(op) = self.op(index) else { return Freed::default() };
        op.state = OpState::Free;
        let stale = op.waker.take();
        self.free.push(index);
        Freed { next: self.next_waiter(), stale }
    }

    /// Who may have a place now, or is to hear that there never will be one.
    fn next_waiter(&self) -> Option<Waker> {
        if self.free.is_empty() && self.failed.is_none() {
            return None;
        }
        self.waiters.front().map(|waiter| waiter.waker.clone())
    }

    /// Who has this ticket waits no more, and another may.
    pub(super) fn leave(&mut self, ticket: Option<u64>) -> Freed {
        // Nearly always the first.
        let at = self.waiters.iter().position(|waiter| Some(waiter.ticket) == ticket);
        let stale = at.and_then(|at| self.waiters.remove(at)).map(|waiter| waiter.waker);
        Freed { next: self.next_waiter(), stale }
    }

    /// Waits for a place, with `ticket` if that was given before. Gives the ticket, and a waker to
    /// be dropped without the lock.
    pub(super) fn wait(&mut self, ticket: Option<u64>, waker: Waker) -> (u64, Option<Waker>) {
        if let Some(ticket) = ticket
            && let Some(waiter) = self.waiters.iter_mut().find(|waiter| waiter.ticket == ticket)
        {
            return (ticket, Some(std::mem::replace(&mut waiter.waker, waker)));
        }
        let ticket = self.next_ticket;
        self.next_ticket = ticket.wrapping_add(1);
        self.waiters.push_back(Waiter { ticket, waker });
        (ticket, None)
    }
}
