//! Attached client, whose socket a second thread may poll beside the reactor.
//!
//! # Purpose
//!
//! A guest that wakes a sleeping queue writes a doorbell, which arrives as a message. If only the
//! reactor polled the socket, each such write would wake two threads one after the other: the
//! reactor to read the message, and the thread of the queue. Therefore a device can take the
//! [`SharedSocket`] of a connection and pass it to that second thread, which reads the message
//! itself.
//!
//! # Wake-up
//!
//! Both threads have the socket in their epoll instances, with `EPOLLEXCLUSIVE`, the second
//! thread's first. The kernel wakes the first instance in this order that has a sleeping thread:
//!
//! * if the second thread sleeps, only the second thread is woken;
//! * if the second thread is awake, busy or stuck, the reactor is woken, as without sharing.
//!
//! So the threads need no explicit hand-over, and the second thread never delays a message that it
//! does not wait for. Correctness does not depend on this order: either or both threads may be
//! woken at any time, also without a message.
//!
//! # Reading
//!
//! While the connection is idle (nothing is partly received or partly sent, no completion is
//! outstanding), the session is in the slot of its [`Share`]. The reactor takes the session out for
//! its turns. The second thread works on the session in the slot, under the slot's lock, on a few
//! messages at a time, and only on writes that it recognizes as doorbells. All other messages
//! (other commands, and messages that have descriptors, are incomplete or are invalid) stay where
//! they are, and the reactor's next turn starts with them. So messages are handled in order. The
//! second thread calls no method of the device, maps, opens and closes nothing, and never blocks:
//! if the lock is taken or the slot is empty, the reactor is using the session.
//!
//! With checkpoints, a message leaves the socket only when its effects survive a crash of this
//! process. The effects of doorbells do: they are written to memory that the next server process
//! has, too. So the second thread may handle doorbells also with checkpoints. But a reply has to be
//! sent in one step with the removal of its message, by the reactor; therefore the second thread
//! handles only posted writes, which have no reply.
//!
//! # No lost messages
//!
//! An arriving message wakes a sleeping thread, and is reported by the next wait of each awake
//! thread unless it has been read until then. The thread that gets the report does one of these:
//!
//! * The reactor takes the session and reads until the socket is empty.
//! * The second thread, if the session is in the slot, reads until the socket is empty, or requests
//!   a turn of the reactor ([`Request::Turn`]).
//! * If the session is not in the slot, or the lock is taken, the second thread requests a turn as
//!   well: the reactor may have emptied the socket before the message arrived, and be about to put
//!   the session back.
//! * A second thread that stops polling requests a turn *after* it has marked the share as ended.
//!   In that turn the reactor reads the mark, removes the other epoll instance from the socket, and
//!   has its own instance report input again, which includes data that are already in the socket.
//!
//! A request for a turn also reaches a reactor that sleeps or is about to sleep (see `inbox`).

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

/// Events of a socket that is in two epoll instances, one of which is to be woken.
const SHARED_WATCH: EventFlags = EventFlags::IN.union(EventFlags::ET).union(EventFlags::EXCLUSIVE);

/// Connection of the reactor, and its share with a second thread.
pub(super) struct Attachment {
    port: PortId,
    epoll: Arc<OwnedFd>,
    /// Session; `None` while it is in the share's slot.
    session: Option<Box<Session>>,
    share: Option<Arc<Share>>,
    /// True if the reactor waits for input as the second of two epoll instances.
    is_second: bool,
    /// Events for which the reactor watches the socket.
    watch: EventFlags,
}

impl Attachment {
    /// Starts to watch a connection.
    pub(super) fn new(port: PortId, epoll: &Arc<OwnedFd>, session: Session) -> Result<Self, Errno> {
        let watch = watch(false, false);
        epoll::add(epoll, session.socket(), token(port), watch)?;
        let (epoll, session) = (Arc::clone(epoll), Some(Box::new(session)));
        Ok(Self { port, epoll, session, share: None, is_second: false, watch })
    }

    /// Takes the session out of the slot, for exclusive use by the reactor. If the second thread is
    /// using it, returns `None`, and the reactor gets a turn afterwards.
    pub(super) fn take_session(&mut self) -> Option<&mut Session> {
        if self.session.is_none() {
            self.session = self.share.as_ref()?.take_session();
        }
        self.session.as_deref_mut()
    }

    /// Ends the share: the reactor alone uses the session, until it is shared again.
    pub(super) fn take_back(&mut self) {
        self.end_share();
    }

    /// Session, unless it is in the slot, where it is idle.
    pub(super) fn busy_session(&mut self) -> Option<&mut Session> {
        self.session.as_deref_mut()
    }

    /// Updates the watched events after a turn.
    ///
    /// # Errors
    ///
    /// A system call failed. The connection is unusable.
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

    /// After a turn that left the session idle: puts the session into the slot for the second
    /// thread, if there is one, or if the device requests one.
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

    /// Stops to watch the connection, and returns the session.
    pub(super) fn close(mut self) -> Option<Box<Session>> {
        self.end_share();
        let session = self.session.take()?;
        // Closing may happen later, on another thread: no events must be reported until then.
        let _ = epoll::delete(&self.epoll, session.socket());
        Some(session)
    }

    /// Ends the share. The reactor alone polls the connection after the next
    /// [`watch`](Self::watch).
    fn end_share(&mut self) {
        self.is_second = false;
        let Some(share) = self.share.take() else { return };
        share.ended.store(true, Ordering::Release);
        let Slot { session, socket, first } = std::mem::take(&mut *share.slot.lock());
        if let Some(socket) = socket {
            // Closing would not remove the events: there are other descriptors of the socket.
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

/// State that reactor and second thread share.
struct Share {
    slot: Mutex<Slot>,
    /// True if the second thread has stopped polling, or the connection has ended.
    ended: AtomicBool,
    /// True if the reactor has needed the session while the second thread was using it. The reactor
    /// does not wait for the second thread, which may have been preempted, because of the other
    /// clients.
    wanted: AtomicBool,
    inbox: Arc<Inbox>,
    port: PortId,
}

#[derive(Default)]
struct Slot {
    /// Session, while it is idle.
    session: Option<Box<Session>>,
    /// Duplicate of the socket, because an epoll instance accepts a descriptor once, and the
    /// reactor has two kinds of watches. `None` after the end of the share.
    socket: Option<OwnedFd>,
    /// Epoll instance of the second thread, the first in the kernel's order.
    first: Option<Arc<OwnedFd>>,
}

impl Share {
    /// True if the second thread polls, so that it precedes the reactor in the kernel's order.
    fn is_watched(&self) -> bool {
        self.slot.lock().first.is_some()
    }

    fn watch_second(&self, epoll: &OwnedFd, port: PortId) -> bool {
        let slot = self.slot.lock();
        let added = slot.socket.as_ref().map(|s| epoll::add(epoll, s, token(port), SHARED_WATCH));
        added.is_some_and(|added| added.is_ok())
    }

    /// Takes the session out of the slot, for the reactor.
    fn take_session(&self) -> Option<Box<Session>> {
        if let Some(mut slot) = self.slot.try_lock() {
            return slot.session.take();
        }
        self.wanted.store(true, Ordering::Relaxed);
        // Either the second thread sees `wanted` after its use, or the lock is free by now.
        fence(Ordering::SeqCst);
        self.slot.try_lock()?.session.take()
    }

    /// Requests a turn after the second thread's use of the session, if the reactor has needed it.
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

/// Interface of the second thread. It never blocks: if the lock of the slot is taken, the call
/// fails as busy or the reactor gets a turn.
impl SocketOwner for Share {
    fn watch(&self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        let busy = || io::Error::from(io::ErrorKind::ResourceBusy);
        let mut slot = self.slot.try_lock().ok_or_else(busy)?;
        let socket = slot.socket.as_ref().ok_or_else(busy)?;
        epoll::add(epoll, socket, EventData::new_u64(token), SHARED_WATCH)?;
        slot.first = Some(Arc::clone(epoll));
        drop(slot);
        // In its turn the reactor becomes the second instance. Without a turn it would do so only
        // after a message that it reads itself, and would be woken for all other messages.
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

/// Events for which a reactor watches the socket's own descriptor.
fn watch(full: bool, is_second: bool) -> EventFlags {
    let mut watch = EventFlags::RDHUP | EventFlags::ET;
    watch.set(EventFlags::IN, !is_second);
    // Writability is watched only if the socket is full, otherwise each read reply would wake the
    // reactor.
    watch.set(EventFlags::OUT, full);
    watch
}
