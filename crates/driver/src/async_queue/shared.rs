//! What futures and whoever drives the queue share.

use crate::admin::AdminCommands;
use crate::attached::AttachedController;
use crate::command::Command;
use crate::completion::Completion;
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
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::Waker;
use std::thread::Thread;
use std::time::{Duration, Instant};

/// Somebody tried to drive the queue, and goes on without.
pub(super) const TRIED: u8 = 1 << 0;
/// Somebody waits to drive the queue.
pub(super) const ASKED: u8 = 1 << 1;
/// Either.
pub(super) const ANY: u8 = TRIED | ASKED;

/// One command, from the first poll of its future until its completion. There are as many as the
/// queue takes at once.
pub(super) struct Op {
    pub(super) state: OpState,
    pub(super) waker: Option<Waker>,
    pub(super) deadline: Option<Instant>,
    pub(super) opcode: u8,
}

pub(super) enum OpState {
    /// There is no command.
    Free,
    /// In the inbox.
    Queued(Command, Option<Buffer>),
    /// In the inbox, but the future is gone: to be freed from there.
    Cancelled,
    /// With the controller.
    Submitted,
    /// With the controller for too long: the future is to fail.
    Expired,
    /// With the controller, and nobody waits any more.
    Abandoned,
    /// For the future to take.
    Done(Result<Completion, IoError>),
}

/// A future that waits for a free [`Op`].
pub(super) struct Waiter {
    pub(super) ticket: u64,
    pub(super) waker: Waker,
    pub(super) deadline: Option<Instant>,
    /// The deadline has passed: the future is to fail.
    pub(super) late: bool,
}

pub(super) struct AsyncState {
    pub(super) ops: Box<[Op]>,
    pub(super) free: Vec<u32>,
    pub(super) inbox: VecDeque<u32>,
    /// What commands with metadata in the inbox say beside their command, by op.
    pub(super) with_metadata: BTreeMap<u32, MetadataCommand>,
    pub(super) waiters: VecDeque<Waiter>,
    pub(super) next_ticket: u64,
    pub(super) closing: bool,
    /// The queue does not work any more.
    pub(super) failed: Option<QueueError>,
    pub(super) stats: QueueStats,
}

/// What an [`AsyncQueue`](super::AsyncQueue), its futures and its worker have in common.
pub(super) struct AsyncShared {
    state: Mutex<AsyncState>,
    /// Whether there is something in the inbox, or the queue is to be closed: for who drives the
    /// queue to look at without the lock.
    inbox_flag: AtomicBool,
    sleeper: SleeperWaker<Arc<AtomicU32>>,
    event: EventFd,
    /// A socket that hangs up when the device has gone.
    hang_up: Option<OwnedFd>,
    /// Nobody drives the queue.
    parked: AtomicBool,
    /// What others have asked for who can not drive the queue at the moment.
    requests: AtomicU8,
    /// The queue's own thread, which drives it if nobody else does.
    thread: OnceLock<Thread>,
    pub(super) capacity: usize,
    pub(super) timeout: Duration,
    controller: Weak<AttachedController>,
    pub(super) qid: u16,
}

impl AsyncShared {
    /// What futures share with whoever drives `queue`, which has to be
    /// [parked](super::parking::WorkerParking::park).
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
            hang_up: queue.controller().plane().device.transport.hang_up(),
            parked: AtomicBool::new(false),
            requests: AtomicU8::new(0),
            thread: OnceLock::new(),
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

    /// To be called with the lock held, before the inbox is looked at.
    pub(super) fn take_inbox_flag(&self) {
        self.inbox_flag.store(false, Ordering::Relaxed);
    }

    /// Something is in the inbox, put there with the lock held.
    pub(super) fn notify_inbox(&self) {
        // Whoever set it sees to it that somebody looks, and who looked took it away with the lock
        // held, so what we put there is seen.
        if !self.inbox_flag.load(Ordering::Acquire) {
            self.inbox_flag.store(true, Ordering::Release);
            self.nudge();
        }
    }

    /// Has somebody look at the queue soon.
    pub(super) fn nudge(&self) {
        // With a full fence in it, which pairs with the one of `WorkerParking::park_silently`.
        if self.sleeper.kick() {
            self.event.signal();
        }
        if self.parked.load(Ordering::Relaxed) {
            self.wake_thread();
        }
    }

    /// Wakes the queue's own thread.
    pub(super) fn wake_thread(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// The queue's own thread is this one.
    pub(super) fn set_thread(&self, thread: Thread) {
        let _ = self.thread.set(thread);
    }

    /// Nobody drives the queue, or somebody does. With the worker's lock held.
    pub(super) fn set_parked(&self, parked: bool) {
        self.parked.store(parked, Ordering::Relaxed);
    }

    /// Somebody else would like to drive the queue.
    pub(super) fn request(&self, how: u8) {
        if self.requests.load(Ordering::Relaxed) & how == 0 {
            self.requests.fetch_or(how, Ordering::Relaxed);
        }
    }

    /// Whether anybody requested that since this was asked last.
    pub(super) fn take_request(&self, how: u8) -> bool {
        self.requests.load(Ordering::Relaxed) & how != 0
            && self.requests.swap(0, Ordering::Relaxed) & how != 0
    }

    /// What the queue's interrupt and new work signal.
    pub(super) fn event(&self) -> &EventFd {
        &self.event
    }

    pub(super) fn hang_up(&self) -> Option<&OwnedFd> {
        self.hang_up.as_ref()
    }

    pub(super) fn close(&self) {
        self.lock().closing = true;
        self.notify_inbox();
    }

    /// Buffers that the device can reach.
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

/// What is left to do after an [`Op`] was freed, without the lock: a waker's own code may come back
/// here, to wake somebody or to drop a future.
#[must_use = "somebody may wait for the free op"]
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

impl AsyncState {
    pub(super) fn op(&mut self, index: u32) -> Option<&mut Op> {
        self.ops.get_mut(index as usize)
    }

    /// Frees an [`Op`].
    pub(super) fn free_op(&mut self, index: u32) -> Freed {
        let Some(op) = self.op(index) else { return Freed::default() };
        op.state = OpState::Free;
        let stale = op.waker.take();
        self.free.push(index);
        Freed { next: self.next_waiter(), stale }
    }

    /// Who may have an [`Op`] now, or is to fail because there never will be one.
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

    /// Waits for an [`Op`], with `ticket` if that was given before. Gives the ticket, and a waker
    /// to be dropped without the lock. Whoever is the only one to wait has to call
    /// [`notify_inbox`](AsyncShared::notify_inbox), so that somebody watches the deadlines.
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
        self.waiters.push_back(Waiter { ticket, waker, deadline, late: false });
        (ticket, None)
    }

    fn waiter(&mut self, ticket: Option<u64>) -> Option<&mut Waiter> {
        // Nearly always the first.
        ticket.and_then(|ticket| self.waiters.iter_mut().find(|waiter| waiter.ticket == ticket))
    }

    /// Whether the one with this ticket has waited for too long.
    pub(super) fn is_late(&mut self, ticket: Option<u64>) -> bool {
        self.waiter(ticket).is_some_and(|waiter| waiter.late)
    }
}
