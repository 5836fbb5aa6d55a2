//! A connection that another thread hears as well.
//!
//! # Why
//!
//! A guest that wakes a sleeping queue writes a doorbell, which comes as a message. If only the
//! reactor heard it, two threads would have to be woken one after the other for each such ring: the
//! reactor to read what it says, and whoever sleeps. So a device can ask for the [`SharedSocket`] of a
//! connection and give it to that sleeper, who reads the message by itself.
//!
//! # Who is woken
//!
//! Both have the socket in their epoll instances, with `EPOLLEXCLUSIVE`, the other thread first.
//! The kernel goes through them in that order and stops at the first that somebody sleeps in:
//!
//! * the other thread sleeps: it alone is woken;
//! * it is awake, busy or stuck: the reactor is woken, as if nothing had been lent.
//!
//! So nothing is handed to and fro, and the other thread never delays a message that it does not wait
//! for. It is what makes this cheap, and not relied on for more: either or both may be woken, at any
//! time, and without a reason.
//!
//! # Who reads
//!
//! The session lies in the slot of its [`Loan`] while the connection rests: nothing is half received,
//! half sent, awaited or owed. The reactor takes it out for its turns. The other thread does not: it
//! works on it where it lies, under the slot's lock, on a few messages at a time, and only on writes
//! that it knows to be doorbells. What is something else, has descriptors, is not there as a whole or
//! makes no sense stays as it is, and the reactor's next turn begins with it. So messages count in
//! their order, and the other thread calls no device, maps, opens and closes nothing, and waits for
//! nobody: where the lock is taken or the slot empty, the reactor is at it.
//!
//! # Why no message is lost
//!
//! A message that arrives wakes one who sleeps, and is reported by the next wait of each who is awake
//! unless it has been read until then. Whoever it is reported to does one of these:
//!
//! * the reactor takes the session and reads until there is no more;
//! * the other thread, if the session is in the slot, reads until there is no more, or leaves a note
//!   for the reactor to go on ([`Control::Look`]);
//! * if the session is not in the slot, or the lock taken, it leaves such a note as well: the reactor
//!   may have read all that there was before the message came, and be about to put the session back;
//! * one that no longer listens has left such a note *after* it was marked so. The reactor looks at the
//!   mark in the turn that follows, takes the other's epoll instance off the socket, and has its own
//!   watch it again for bytes, which reports those that are there already.
//!
//! A note reaches a reactor that sleeps or is about to (see the inbox).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use rustix::event::epoll::{self, EventData, EventFlags};

use super::inbox::{Control, Inbox, PortId};
use super::session::Session;
use crate::Errno;
use crate::device::Device;

/// What two wait for, of whom one is to be woken.
const SHARED_WATCH: EventFlags = EventFlags::IN.union(EventFlags::ET).union(EventFlags::EXCLUSIVE);

/// A connection, and to whom it is lent.
pub(super) struct Attachment {
    port: PortId,
    epoll: Arc<OwnedFd>,
    /// Here, or else in the loan's slot.
    session: Option<Box<Session>>,
    loan: Option<Arc<Loan>>,
    /// The reactor waits for bytes as the second of two.
    shared: bool,
    /// What it waits for at the socket itself.
    watch: EventFlags,
}

impl Attachment {
    /// Begins to watch a connection.
    pub(super) fn new(port: PortId, epoll: &Arc<OwnedFd>, session: Session) -> Result<Self, Errno> {
        let watch = watch(false, false);
        epoll::add(epoll, session.socket(), token(port), watch)?;
        let (epoll, session) = (Arc::clone(epoll), Some(Box::new(session)));
        Ok(Self { port, epoll, session, loan: None, shared: false, watch })
    }

    /// The session, which nobody else touches from here on.
    pub(super) fn hold(&mut self) -> Option<&mut Session> {
        if self.session.is_none() {
            self.session = self.loan.as_ref()?.lock().session.take();
        }
        self.session.as_deref_mut()
    }

    /// The session, unless it lies where others reach it: then nothing is awaited of it, nor owed.
    pub(super) fn held(&mut self) -> Option<&mut Session> {
        self.session.as_deref_mut()
    }

    /// After a turn: waits for what matters now.
    ///
    /// # Errors
    ///
    /// The system's. The connection is of no use then.
    pub(super) fn watch(&mut self) -> Result<(), Errno> {
        if let Some(loan) = &self.loan {
            if loan.over.load(Ordering::Acquire) {
                self.recall();
            } else if !self.shared && loan.is_heard() {
                self.shared = loan.watch_second(&self.epoll, self.port);
                if !self.shared {
                    self.recall();
                }
            }
        }
        let Some(session) = &self.session else { return Ok(()) };
        let watch = watch(session.full, self.shared);
        if watch != self.watch {
            epoll::modify(&self.epoll, session.socket(), token(self.port), watch)?;
            self.watch = watch;
        }
        Ok(())
    }

    /// After a turn that left nothing to do: puts the session where the other one reaches it, if
    /// there is one or the device wants one.
    pub(super) fn rest(&mut self, device: &mut dyn Device, inbox: &Arc<Inbox>) {
        let Some(session) = self.session.take_if(|session| session.is_at_rest()) else { return };
        if let Some(loan) = &self.loan {
            loan.lock().session = Some(session);
        } else if device.wants_hearing()
            && let Ok(socket) = rustix::io::fcntl_dupfd_cloexec(session.socket(), 0)
        {
            let slot = Slot { session: Some(session), socket: Some(socket), first: None };
            let loan = Arc::new(Loan {
                slot: Mutex::new(slot),
                over: AtomicBool::new(false),
                inbox: Arc::clone(inbox),
                port: self.port,
            });
            self.loan = Some(Arc::clone(&loan));
            device.share_socket(SharedSocket(loan));
        } else {
            self.session = Some(session);
        }
    }

    /// The end of it: the session, which nobody watches any more.
    pub(super) fn close(mut self) -> Option<Box<Session>> {
        self.recall();
        let session = self.session.take()?;
        // It may take its time to be closed, and is not to be heard of meanwhile.
        let _ = epoll::delete(&self.epoll, session.socket());
        Some(session)
    }

    /// Ends the loan. From here on, the reactor alone hears the connection once it watches it.
    fn recall(&mut self) {
        self.shared = false;
        let Some(loan) = self.loan.take() else { return };
        loan.over.store(true, Ordering::Release);
        let Slot { session, socket, first } = std::mem::take(&mut *loan.lock());
        if let Some(socket) = socket {
            // Closing it would not do: it is not the only descriptor of that socket.
            for epoll in first.iter().chain([&self.epoll]) {
                let _ = epoll::delete(epoll, &socket);
            }
        }
        self.session = self.session.take().or(session);
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.recall();
    }
}

/// What both sides of a loan touch.
struct Loan {
    slot: Mutex<Slot>,
    /// The other one no longer listens, or the connection is over.
    over: AtomicBool,
    inbox: Arc<Inbox>,
    port: PortId,
}

#[derive(Default)]
struct Slot {
    /// While it rests.
    session: Option<Box<Session>>,
    /// A duplicate: an epoll instance takes a descriptor once, and the reactor waits for two kinds of
    /// things, in two ways. Gone when the loan is over.
    socket: Option<OwnedFd>,
    /// The other's epoll instance, which the kernel asks first.
    first: Option<Arc<OwnedFd>>,
}

impl Loan {
    /// The reactor's way in: the other one is done soon.
    fn lock(&self) -> MutexGuard<'_, Slot> {
        // A session that a panic left in the middle of something is none that could do harm.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The other's way in.
    fn try_lock(&self) -> Option<MutexGuard<'_, Slot>> {
        match self.slot.try_lock() {
            Ok(slot) => Some(slot),
            Err(TryLockError::Poisoned(slot)) => Some(slot.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Whether the other one listens: then it is before us in the kernel's order.
    fn is_heard(&self) -> bool {
        self.lock().first.is_some()
    }

    fn watch_second(&self, epoll: &OwnedFd, port: PortId) -> bool {
        let slot = self.lock();
        let added = slot.socket.as_ref().map(|s| epoll::add(epoll, s, token(port), SHARED_WATCH));
        added.is_some_and(|added| added.is_ok())
    }

    /// Leaves the reactor a note to look at the connection.
    fn leave_note(&self) {
        self.inbox.push(Control::Look { port: self.port });
    }
}

/// What came of listening.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolledWrites {
    /// Writes that were taken.
    pub writes: u32,
    /// There was no more. Otherwise the reactor sees to the rest.
    pub all: bool,
}

/// The socket of a connection: lets a thread that sleeps in an epoll instance of its own wake up at
/// the client's messages, and take those that are only meant to wake it. See [`Device::share_socket`].
///
/// Dropping it gives it back. It is of no use any more when the client has left.
pub struct SharedSocket(Arc<Loan>);

impl SharedSocket {
    /// Reports messages to `epoll` as `token` from now on, edge-triggered. Once.
    ///
    /// # Errors
    ///
    /// The system's; or the reactor has something to do at the connection just now.
    pub fn watch(&self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        let busy = || io::Error::from(io::ErrorKind::ResourceBusy);
        let mut slot = self.0.try_lock().ok_or_else(busy)?;
        let socket = slot.socket.as_ref().ok_or_else(busy)?;
        epoll::add(epoll, socket, EventData::new_u64(token), SHARED_WATCH)?;
        slot.first = Some(Arc::clone(epoll));
        drop(slot);
        // So that the reactor steps back. By itself it would only with a message that it is quick
        // enough to find, and be woken for all those that it is not.
        self.0.leave_note();
        Ok(())
    }

    /// To be called for each such report: offers `write` the writes that have come, a few of them, by
    /// region, offset and data. It is to carry one out and return true, or to leave it alone and
    /// return false: that one, and all that follows, is the reactor's.
    pub fn poll_writes(&self, write: &mut dyn FnMut(u32, u64, &[u8]) -> bool) -> PolledWrites {
        let heard = match self.0.try_lock() {
            Some(mut slot) => slot.session.as_mut().map(|session| session.poll_writes(write)),
            None => None,
        };
        let heard = heard.unwrap_or(PolledWrites { writes: 0, all: false });
        if !heard.all {
            self.0.leave_note();
        }
        heard
    }
}

impl Drop for SharedSocket {
    fn drop(&mut self) {
        if !self.0.over.swap(true, Ordering::AcqRel) {
            self.0.leave_note();
        }
    }
}

impl std::fmt::Debug for SharedSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedSocket").field("port", &self.0.port).finish_non_exhaustive()
    }
}

fn token(port: PortId) -> EventData {
    EventData::new_u64(port.0 << 1 | 1)
}

/// What a reactor waits for at the socket itself.
fn watch(full: bool, shared: bool) -> EventFlags {
    let mut watch = EventFlags::RDHUP | EventFlags::ET;
    watch.set(EventFlags::IN, !shared);
    // Watched only when it matters: otherwise each reply that is read would wake us.
    watch.set(EventFlags::OUT, full);
    watch
}
