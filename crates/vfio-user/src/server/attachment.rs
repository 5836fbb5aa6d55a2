//! An attached client, whose socket another thread may poll as well.
//!
//! # Why
//!
//! A guest that wakes a sleeping queue writes a doorbell, which comes as a message. If only the
//! reactor polled the socket, two threads would have to be woken one after the other for each such
//! write: the reactor to read the message, and the thread that sleeps. So a device can ask for the
//! [`SharedSocket`] of a connection and give it to that thread, which reads the message by itself.
//!
//! # Who is woken
//!
//! Both have the socket in their epoll instances, with `EPOLLEXCLUSIVE`, the other thread first.
//! The kernel goes through them in that order and stops at the first in which somebody sleeps:
//!
//! * the other thread sleeps: it alone is woken;
//! * it is awake, busy or stuck: the reactor is woken, as if nothing was shared.
//!
//! So nothing is handed over, and the other thread never delays a message that it does not wait
//! for. It is what makes this cheap, and not relied on for more: either or both may be woken, at
//! any time, and without a reason.
//!
//! # Who reads
//!
//! The session lies in the slot of its [`Share`] while the connection is idle: nothing is half
//! received, half sent or awaited. The reactor takes it out for its turns. The other thread does
//! not: it works on it where it lies, under the slot's lock, on a few messages at a time, and only
//! on writes that it knows to be doorbells. What is something else, has descriptors, is not there
//! as a whole or makes no sense stays as it is, and the reactor's next turn begins with it. So
//! messages count in their order, and the other thread calls no device, maps, opens and closes
//! nothing, and waits for nobody: where the lock is taken or the slot empty, the reactor is at work
//! on it.
//!
//! If the session is recorded, for a process that goes on should this one die, messages leave the
//! socket only when what they have brought about outlives this process. Doorbells do by
//! themselves: they are written to memory that the next process has as well. So that is so for the
//! other thread, too. But a reply has to be sent in one step with that, by the reactor; so the other
//! thread takes posted writes only, which have none.
//!
//! # Why no message is lost
//!
//! A message that arrives wakes one who sleeps, and is reported by the next wait of each who is
//! awake unless it has been read until then. Whoever it is reported to does one of these:
//!
//! * the reactor takes the session and reads until there is no more;
//! * the other thread, if the session is in the slot, reads until there is no more, or asks the
//!   reactor for a turn ([`Request::Turn`]);
//! * if the session is not in the slot, or the lock taken, it asks for a turn as well: the reactor
//!   may have read all that there was before the message came, and be about to put the session
//!   back;
//! * one that no longer polls has asked for a turn *after* it marked the share as ended. The
//!   reactor looks at the mark in the turn that follows, takes the other's epoll instance off the
//!   socket, and has its own watch it again for bytes, which reports those that are there already.
//!
//! A request reaches a reactor that sleeps or is about to (see the inbox).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use parking_lot::Mutex;
use rustix::event::epoll::{self, EventData, EventFlags};

use super::inbox::{Inbox, PortId, Request};
use super::session::Session;
use crate::Errno;
use crate::device::Device;
use crate::shared_socket::{PolledWrites, SharedSocket, SocketOwner};

/// What two wait for, of whom one is to be woken.
const SHARED_WATCH: EventFlags = EventFlags::IN.union(EventFlags::ET).union(EventFlags::EXCLUSIVE);

/// A connection, and with whom it is shared.
pub(super) struct Attachment {
    port: PortId,
    epoll: Arc<OwnedFd>,
    /// Here, or else in the share's slot.
    session: Option<Box<Session>>,
    share: Option<Arc<Share>>,
    /// The reactor waits for bytes as the second of two.
    is_second: bool,
    /// What it waits for at the socket itself.
    watch: EventFlags,
}

impl Attachment {
    /// Begins to watch a connection.
    pub(super) fn new(port: PortId, epoll: &Arc<OwnedFd>, session: Session) -> Result<Self, Errno> {
        let watch = watch(false, false);
        epoll::add(epoll, session.socket(), token(port), watch)?;
        let (epoll, session) = (Arc::clone(epoll), Some(Box::new(session)));
        Ok(Self { port, epoll, session, share: None, is_second: false, watch })
    }

    /// The session, which nobody else touches from here on. If somebody does now, there is a turn
    /// when they have let go of it.
    pub(super) fn take_session(&mut self) -> Option<&mut Session> {
        if self.session.is_none() {
            self.session = self.share.as_ref()?.take_session();
        }
        self.session.as_deref_mut()
    }

    /// Nobody but the reactor reaches the session from here on, until it is shared again.
    pub(super) fn take_back(&mut self) {
        self.end_share();
    }

    /// The session, unless it lies where others reach it: then it is idle.
    pub(super) fn busy_session(&mut self) -> Option<&mut Session> {
        self.session.as_deref_mut()
    }

    /// After a turn: waits for what matters now.
    ///
    /// # Errors
    ///
    /// The system's. The connection is of no use then.
    pub(super) fn watch(&mut self) -> Result<(), Errno> {
        if let Some(share) = &self.share {
            if share.ended.load(Ordering::Acquire) {
                self.end_share();
            } else if !self.is_second && share.is_watched() {
                self.is_second = share.watch_second(&self.epoll, self.port);
                if !self.is_second {
                    self.end_share();
                }
            }
        }
        let Some(session) = &self.session else { return Ok(()) };
        let watch = watch(session.full, self.is_second);
        if watch != self.watch {
            epoll::modify(&self.epoll, session.socket(), token(self.port), watch)?;
            self.watch = watch;
        }
        Ok(())
    }

    /// After a turn that left nothing to do: puts the session where the other thread reaches it, if
    /// there is one or the device wants one.
    pub(super) fn share_if_idle(&mut self, device: &mut dyn Device, inbox: &Arc<Inbox>) {
        let Some(session) = self.session.take_if(|session| session.is_idle()) else { return };
        if let Some(share) = &self.share {
            share.slot.lock().session = Some(session);
        } else if device.wants_shared_socket()
            && let Ok(socket) = rustix::io::fcntl_dupfd_cloexec(session.socket(), 0)
        {
            let slot = Slot { session: Some(session), socket: Some(socket), first: None };
            let share = Arc::new(Share {
                slot: Mutex::new(slot),
                ended: AtomicBool::new(false),
                wanted: AtomicBool::new(false),
                inbox: Arc::clone(inbox),
                port: self.port,
            });
            self.share = Some(Arc::clone(&share));
            device.share_socket(SharedSocket::new(share));
        } else {
            self.session = Some(session);
        }
    }

    /// The end of it: the session, which nobody watches any more.
    pub(super) fn close(mut self) -> Option<Box<Session>> {
        self.end_share();
        let session = self.session.take()?;
        // Closing it may take its time, and no events of it are wanted meanwhile.
        let _ = epoll::delete(&self.epoll, session.socket());
        Some(session)
    }

    /// From here on, the reactor alone polls the connection once it watches it.
    fn end_share(&mut self) {
        self.is_second = false;
        let Some(share) = self.share.take() else { return };
        share.ended.store(true, Ordering::Release);
        let Slot { session, socket, first } = std::mem::take(&mut *share.slot.lock());
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
        self.end_share();
    }
}

/// What the reactor and the other thread both touch.
struct Share {
    slot: Mutex<Slot>,
    /// The other thread no longer polls, or the connection is over.
    ended: AtomicBool,
    /// The reactor has come while the other thread had the session, and did not wait: that one may
    /// have lost its processor meanwhile, and the other clients wait for the reactor.
    wanted: AtomicBool,
    inbox: Arc<Inbox>,
    port: PortId,
}

#[derive(Default)]
struct Slot {
    /// While it is idle.
    session: Option<Box<Session>>,
    /// A duplicate: an epoll instance takes a descriptor once, and the reactor waits for two kinds
    /// of things, in two ways. Gone when the share has ended.
    socket: Option<OwnedFd>,
    /// The other's epoll instance, which the kernel asks first.
    first: Option<Arc<OwnedFd>>,
}

impl Share {
    /// Whether the other thread polls: then it is before us in the kernel's order.
    fn is_watched(&self) -> bool {
        self.slot.lock().first.is_some()
    }

    fn watch_second(&self, epoll: &OwnedFd, port: PortId) -> bool {
        let slot = self.slot.lock();
        let added = slot.socket.as_ref().map(|s| epoll::add(epoll, s, token(port), SHARED_WATCH));
        added.is_some_and(|added| added.is_ok())
    }

    /// The session, for the reactor.
    fn take_session(&self) -> Option<Box<Session>> {
        if let Some(mut slot) = self.slot.try_lock() {
            return slot.session.take();
        }
        self.wanted.store(true, Ordering::Relaxed);
        // Either the other thread sees that from here on, or the lock is free by now.
        fence(Ordering::SeqCst);
        self.slot.try_lock()?.session.take()
    }

    /// The other thread has let go of the session.
    fn is_free(&self) {
        fence(Ordering::SeqCst);
        if self.wanted.load(Ordering::Relaxed) && self.wanted.swap(false, Ordering::Relaxed) {
            self.request_turn();
        }
    }

    fn request_turn(&self) {
        self.inbox.push(Request::Turn { port: self.port });
    }
}

/// The other thread's way in: it never waits for the slot.
impl SocketOwner for Share {
    fn watch(&self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        let busy = || io::Error::from(io::ErrorKind::ResourceBusy);
        let mut slot = self.slot.try_lock().ok_or_else(busy)?;
        let socket = slot.socket.as_ref().ok_or_else(busy)?;
        epoll::add(epoll, socket, EventData::new_u64(token), SHARED_WATCH)?;
        slot.first = Some(Arc::clone(epoll));
        drop(slot);
        // So that the reactor steps back. By itself it would only with a message that it is quick
        // enough to find, and be woken for all those that it is not.
        self.request_turn();
        Ok(())
    }

    fn poll_writes(&self, write: &mut dyn FnMut(u32, u64, &[u8]) -> bool) -> PolledWrites {
        let polled = match self.slot.try_lock() {
            Some(mut slot) => slot.session.as_mut().map(|session| session.poll_writes(write)),
            None => None,
        };
        self.is_free();
        let polled = polled.unwrap_or(PolledWrites { writes: 0, all: false });
        if !polled.all {
            self.request_turn();
        }
        polled
    }

    fn give_back(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.request_turn();
        }
    }
}

fn token(port: PortId) -> EventData {
    EventData::new_u64(port.0 << 1 | 1)
}

/// What a reactor waits for at the socket itself.
fn watch(full: bool, is_second: bool) -> EventFlags {
    let mut watch = EventFlags::RDHUP | EventFlags::ET;
    watch.set(EventFlags::IN, !is_second);
    // Watched only when it matters: otherwise each reply that is read would wake us.
    watch.set(EventFlags::OUT, full);
    watch
}
