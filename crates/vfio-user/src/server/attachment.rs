//! Attached client, whose socket a second thread may poll in addition to the reactor.
//!
//! # Purpose
//!
//! If a guest writes the doorbell of a sleeping queue, the write arrives as a message. If only the
//! reactor polled the socket, the write would wake two threads one after the other: the reactor,
//! which reads the message, and the queue's I/O thread. Therefore a device can request the
//! [`SharedSocket`] of a connection and pass it to the I/O thread, here called the second thread,
//! which then reads the message itself.
//!
//! # Wake-up
//!
//! Both threads have the socket in their epoll instances, with `EPOLLEXCLUSIVE`. The second
//! thread's instance was added first. The kernel wakes a sleeping thread of the first instance that
//! has one:
//!
//! * If the second thread sleeps, the kernel wakes only the second thread.
//! * If the second thread is awake (busy or blocked), the kernel wakes the reactor.
//!
//! So neither thread passes messages to the other explicitly, and a busy second thread delays no
//! message. Correctness does not depend on the order of the instances: the kernel may wake either
//! thread or both at any time, even without a message.
//!
//! # Reading
//!
//! The session is idle if nothing is partly received or partly sent, and no completion is
//! outstanding. While it is idle, it is in the slot of its [`SharedSession`]. The reactor takes it
//! out of the slot for each of its turns, in which it handles the messages of one connection. The
//! second thread uses the session inside the slot, under the slot's lock, for a few messages at a
//! time. It handles only writes that it recognizes as doorbells. Other messages stay in the socket:
//! other commands, messages with descriptors, and incomplete or invalid ones. The reactor's next
//! turn starts with them, so messages are handled in order. The second thread calls no method of
//! the device, does not map, open or close anything, and never blocks. If the lock is taken or the
//! slot is empty, the reactor is using the session.
//!
//! If checkpoints are on, a message leaves the socket only when its effects survive a crash of this
//! process. The effects of doorbells do survive: they are written to memory that the next server
//! process also maps. So the second thread may handle doorbells in this case too. A reply, however,
//! must be sent in one step with the removal of its message, and only the reactor can do that. So
//! the second thread then handles only posted writes, which have no reply.
//!
//! # No lost messages
//!
//! If a message arrives, a sleeping thread wakes. A thread that is awake gets a report from its
//! next wait, unless the message has been read before. The thread that gets the report does one of
//! these:
//!
//! * The reactor takes the session and reads until the socket is empty.
//! * The second thread, if the session is in the slot, reads until the socket is empty, or requests
//!   a turn of the reactor ([`Request::Turn`]).
//! * If the session is not in the slot, or the lock is taken, the second thread requests a turn
//!   too: the reactor may have emptied the socket before the message arrived, and be about to put
//!   the session back.
//! * If the second thread stops polling, it requests a turn *after* it has marked the sharing as
//!   ended. In that turn, the reactor sees the mark, removes the socket from the other epoll
//!   instance, and watches for input again. This watch reports data that are already in the socket.
//!
//! A request for a turn also wakes a reactor that sleeps or is about to sleep (see `inbox`).

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

/// Events of a socket that is in two epoll instances. For each message, the kernel wakes a thread
/// of only one instance.
const SHARED_WATCH: EventFlags = EventFlags::IN.union(EventFlags::ET).union(EventFlags::EXCLUSIVE);

/// Connection that the reactor polls, and that a second thread may poll too.
pub(super) struct Attachment {
    port: PortId,
    epoll: Arc<OwnedFd>,
    /// Session; `None` while it is in the slot of `shared`.
    session: Option<Box<Session>>,
    shared: Option<Arc<SharedSession>>,
    /// True if the reactor's epoll instance was added to the socket after the second thread's, so
    /// that the kernel tries it second.
    is_second: bool,
    /// Events for which the reactor watches the socket.
    watch: EventFlags,
}

impl Attachment {
    /// Adds a connection to the reactor's epoll instance.
    pub(super) fn new(port: PortId, epoll: &Arc<OwnedFd>, session: Session) -> Result<Self, Errno> {
        let watch = watch(false, false);
        epoll::add(epoll, session.socket(), token(port), watch)?;
        let (epoll, session) = (Arc::clone(epoll), Some(Box::new(session)));
        Ok(Self { port, epoll, session, shared: None, is_second: false, watch })
    }

    /// Takes the session out of the slot, for exclusive use by the reactor. If the second thread is
    /// using it, returns `None`; the second thread then requests a turn of the reactor.
    pub(super) fn take_session(&mut self) -> Option<&mut Session> {
        if self.session.is_none() {
            self.session = self.shared.as_ref()?.take_session();
        }
        self.session.as_deref_mut()
    }

    /// Stops sharing the session. Only the reactor uses it until it is shared again.
    pub(super) fn take_back(&mut self) {
        self.end_sharing();
    }

    /// Session, if it is not in the slot. (A session in the slot is idle.)
    pub(super) fn busy_session(&mut self) -> Option<&mut Session> {
        self.session.as_deref_mut()
    }

    /// Updates the watched events after a turn.
    ///
    /// # Errors
    ///
    /// A system call failed. The connection is unusable.
    pub(super) fn watch(&mut self) -> Result<(), Errno> {
        if let Some(shared) = &self.shared {
            if shared.ended.load(Ordering::Acquire) {
                self.end_sharing();
            } else if !self.is_second && shared.is_watched() {
                self.is_second = shared.watch_second(&self.epoll, self.port);
                if !self.is_second {
                    self.end_sharing();
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

    /// Puts the session into the slot for the second thread, if the session is idle after the
    /// reactor's turn. If there is no slot yet, creates one only if the device requests a shared
    /// socket.
    pub(super) fn share_if_idle(&mut self, device: &mut dyn Device, inbox: &Arc<Inbox>) {
        let Some(session) = self.session.take_if(|session| session.is_idle()) else { return };
        if let Some(shared) = &self.shared {
            shared.slot.lock().session = Some(session);
        } else if device.requests_shared_socket()
            && let Ok(socket) = rustix::io::fcntl_dupfd_cloexec(session.socket(), 0)
        {
            let slot = Slot { session: Some(session), socket: Some(socket), first: None };
            let shared = Arc::new(SharedSession {
                slot: Mutex::new(slot),
                ended: AtomicBool::new(false),
                turn_requested: AtomicBool::new(false),
                inbox: Arc::clone(inbox),
                port: self.port,
            });
            self.shared = Some(Arc::clone(&shared));
            device.share_socket(SharedSocket::new(shared));
        } else {
            self.session = Some(session);
        }
    }

    /// Stops watching the connection, and returns the session.
    pub(super) fn close(mut self) -> Option<Box<Session>> {
        self.end_sharing();
        let session = self.session.take()?;
        // Another thread may close the socket later. Until then, the socket must not report events
        // to the reactor.
        let _ = epoll::delete(&self.epoll, session.socket());
        Some(session)
    }

    /// Ends the sharing of the session. After the next [`watch`](Self::watch), only the reactor
    /// polls the connection.
    fn end_sharing(&mut self) {
        self.is_second = false;
        let Some(shared) = self.shared.take() else { return };
        shared.ended.store(true, Ordering::Release);
        let Slot { session, socket, first } = std::mem::take(&mut *shared.slot.lock());
        if let Some(socket) = socket {
            // The socket has further descriptors, so closing this duplicate would not remove it
            // from the epoll instances.
            for epoll in first.iter().chain([&self.epoll]) {
                let _ = epoll::delete(epoll, &socket);
            }
        }
        self.session = self.session.take().or(session);
    }
}

impl Drop for Attachment {
    fn drop(&mut self) {
        self.end_sharing();
    }
}

/// State that the reactor and the second thread share.
struct SharedSession {
    slot: Mutex<Slot>,
    /// True if the second thread has stopped polling, or the connection has ended.
    ended: AtomicBool,
    /// True if the reactor needed the session while the second thread was using it. The reactor
    /// does not wait for the second thread, which may be preempted, because other clients would
    /// have to wait too.
    turn_requested: AtomicBool,
    inbox: Arc<Inbox>,
    port: PortId,
}

#[derive(Default)]
struct Slot {
    /// Session; present only while it is idle.
    session: Option<Box<Session>>,
    /// Duplicate of the socket; `None` after the sharing has ended. It is necessary because an
    /// epoll instance accepts each descriptor only once, and the reactor watches the socket twice:
    /// for input by the duplicate, as the second thread does, and for other events by the original
    /// descriptor.
    socket: Option<OwnedFd>,
    /// Epoll instance of the second thread. The kernel tries it before that of the reactor.
    first: Option<Arc<OwnedFd>>,
}

impl SharedSession {
    /// True if the second thread polls, so that the kernel tries its epoll instance before the
    /// reactor's.
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
        self.turn_requested.store(true, Ordering::Relaxed);
        // With the fence, one of two cases applies: the second thread sees `turn_requested` when it
        // releases the session, or it has already released the lock, and this second attempt
        // succeeds.
        fence(Ordering::SeqCst);
        self.slot.try_lock()?.session.take()
    }

    /// Ends the second thread's use of the session: requests a turn of the reactor, if the reactor
    /// has needed the session meanwhile.
    fn is_free(&self) {
        fence(Ordering::SeqCst);
        if self.turn_requested.load(Ordering::Relaxed)
            && self.turn_requested.swap(false, Ordering::Relaxed)
        {
            self.request_turn();
        }
    }

    fn request_turn(&self) {
        self.inbox.push(Request::Turn { port: self.port });
    }
}

/// Interface for the second thread. Its methods never block. If the reactor holds the lock of the
/// slot, `watch` fails as busy, and `poll_writes` requests a turn of the reactor.
impl SocketOwner for SharedSession {
    fn watch(&self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        let busy = || io::Error::from(io::ErrorKind::ResourceBusy);
        let mut slot = self.slot.try_lock().ok_or_else(busy)?;
        let socket = slot.socket.as_ref().ok_or_else(busy)?;
        epoll::add(epoll, socket, EventData::new_u64(token), SHARED_WATCH)?;
        slot.first = Some(Arc::clone(epoll));
        drop(slot);
        // In the requested turn, the reactor adds its epoll instance to the socket again, so that
        // it is behind the second thread's instance. Before that turn, each message wakes the
        // reactor too.
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

    fn stop_sharing(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.request_turn();
        }
    }
}

fn token(port: PortId) -> EventData {
    EventData::new_u64(port.0 << 1 | 1)
}

/// Events for which the reactor watches the socket's own descriptor.
fn watch(full: bool, is_second: bool) -> EventFlags {
    let mut watch = EventFlags::RDHUP | EventFlags::ET;
    watch.set(EventFlags::IN, !is_second);
    // Writability is watched only if the socket is full. Otherwise the reactor would be woken
    // whenever the client has read a reply.
    watch.set(EventFlags::OUT, full);
    watch
}
