//! Threads that close descriptors and mappings whose close may block.
//!
//! `close` frees the descriptor number immediately, but then may wait for a user-space file system
//! (FLUSH of FUSE). For memory and eventfds, `close` waits only for the kernel, but a peer can make
//! that slow: the kernel may have to free all pages of a file, a million file locks, or the entries
//! of many epoll instances for the eventfd. So separate threads close descriptors. They are started
//! when needed.
//!
//! # Isolation
//!
//! Each served device has its own closer, so a peer cannot delay the closing of other devices'
//! descriptors. A closer has at most three threads, one per [`Lane`]. If a FUSE daemon never
//! replies, its files delay other foreign descriptors, but not the memory of the next client. (A
//! thread per descriptor would also work, but costs more than a descriptor.)
//!
//! # Limits
//!
//! If more than [`MAX_FOREIGN`] foreign descriptors wait to be closed, the client is disconnected,
//! and the next client of the device is accepted only when fewer wait. If more than [`MAX_CLOSING`]
//! other descriptors wait, nothing is received from the client until fewer wait. So a client never
//! causes more open descriptors than these limits plus those of one message. The client's address
//! space limits its mapped memory, which counts until it is unmapped.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::net::{Shutdown, shutdown};
use tracing::warn;

/// Maximum number of descriptors with a possibly blocking close (foreign descriptors) that may wait
/// to be closed, for all clients of a device.
const MAX_FOREIGN: usize = 16;

/// Maximum number of memory and eventfd descriptors that may wait to be closed.
const MAX_CLOSING: usize = 64;

/// Time after which a thread without work ends.
const IDLE: Duration = Duration::from_secs(1);

/// Group of objects to close, by the reason for which their close may take long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// Descriptors whose close may block indefinitely.
    Foreign,
    /// Descriptors of memory and eventfds, whose close waits only for the kernel.
    Known,
    /// Mapped memory, and other objects whose drop may take long but always ends.
    Memory,
}

/// Closes descriptors, and drops other objects whose drop may block, on its own threads.
#[derive(Default)]
pub struct Closer {
    /// True if the caller's thread closes the objects, and no other threads exist.
    at_once: bool,
    foreign: Mutex<Queue>,
    known: Mutex<Queue>,
    memory: Mutex<Queue>,
    wake: [Condvar; 3],
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Box<dyn Any + Send>>,
    /// True while the lane's thread exists.
    at_work: bool,
    /// True while the thread closes an object.
    closing: bool,
    /// Callback to run as soon as the number of waiting objects is within the limit again.
    room: Option<Box<dyn FnOnce() + Send>>,
}

impl Queue {
    fn count(&self) -> usize {
        self.waiting.len() + usize::from(self.closing)
    }
}

impl Closer {
    /// Creates a closer with threads. If `at_once`, the closer has no threads, and closes on the
    /// caller's thread.
    pub(crate) fn new(at_once: bool) -> Self {
        Self { at_once, ..Self::default() }
    }

    /// Drops `what` on another thread. The drop may take long, but must end, as for mapped memory.
    pub fn drop_later(self: &Arc<Self>, what: Box<dyn Any + Send>) {
        self.add(Lane::Memory, what);
    }

    pub(super) fn close(self: &Arc<Self>, lane: Lane, fd: OwnedFd) {
        self.add(lane, Box::new(fd));
    }

    /// True if too many foreign descriptors wait to be closed. The next client must then not be
    /// accepted.
    pub fn is_overloaded(self: &Arc<Self>) -> bool {
        let mut queue = self.foreign.lock();
        self.start(Lane::Foreign, &mut queue);
        queue.count() > MAX_FOREIGN
    }

    /// True if too many memory and eventfd descriptors wait to be closed. Nothing may then be
    /// received. When fewer wait, `room` is called on another thread.
    pub(crate) fn is_full(self: &Arc<Self>, room: impl FnOnce() + Send + 'static) -> bool {
        let mut queue = self.known.lock();
        if queue.count() <= MAX_CLOSING {
            return false;
        }
        self.start(Lane::Known, &mut queue);
        queue.room = Some(Box::new(room));
        true
    }

    fn lane(&self, lane: Lane) -> (&Mutex<Queue>, &Condvar) {
        let [foreign, known, memory] = &self.wake;
        match lane {
            Lane::Foreign => (&self.foreign, foreign),
            Lane::Known => (&self.known, known),
            Lane::Memory => (&self.memory, memory),
        }
    }

    fn add(self: &Arc<Self>, lane: Lane, what: Box<dyn Any + Send>) {
        if self.at_once {
            return drop(what);
        }
        let (queue, wake) = self.lane(lane);
        let mut queue = queue.lock();
        queue.waiting.push_back(what);
        self.start(lane, &mut queue);
        wake.notify_one();
    }

    fn start(self: &Arc<Self>, lane: Lane, queue: &mut Queue) {
        if queue.at_work || queue.waiting.is_empty() {
            return;
        }
        let closer = Arc::clone(self);
        let thread = std::thread::Builder::new().name("closer".into());
        match thread.spawn(move || closer.work(lane)) {
            Ok(_) => queue.at_work = true,
            // The objects stay in the queue and count for its limit. The next call tries again to
            // start a thread.
            Err(error) => warn!("no thread for closing a peer's descriptors: {error}"),
        }
    }

    fn work(&self, lane: Lane) {
        let (queue, wake) = self.lane(lane);
        let mut queue_now = queue.lock();
        loop {
            while let Some(what) = queue_now.waiting.pop_front() {
                queue_now.closing = true;
                drop(queue_now);
                drop(what);
                queue_now = queue.lock();
                queue_now.closing = false;
                if queue_now.count() <= MAX_CLOSING
                    && let Some(room) = queue_now.room.take()
                {
                    drop(queue_now);
                    room();
                    queue_now = queue.lock();
                }
            }
            let timed_out = wake.wait_for(&mut queue_now, IDLE).timed_out();
            if timed_out && queue_now.waiting.is_empty() {
                queue_now.at_work = false;
                return;
            }
        }
    }
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closer")
            .field("foreign", &self.foreign.lock().count())
            .field("known", &self.known.lock().count())
            .field("memory", &self.memory.lock().count())
            .finish_non_exhaustive()
    }
}

/// Connected socket. Closing a socket with unreceived data also closes the descriptors in these
/// data, which may block. So a [`Closer`] closes the socket in that case.
#[derive(Debug)]
pub(crate) struct Stream {
    /// The socket; `None` only during the drop.
    socket: Option<OwnedFd>,
    closer: Arc<Closer>,
    /// True if another process serves the peer on the same socket. The drop must then not shut down
    /// the connection.
    is_lent: bool,
}

impl Stream {
    pub(crate) fn new(socket: OwnedFd, closer: Arc<Closer>) -> Self {
        // The socket receives out-of-band data like other data. Otherwise the kernel would discard
        // them during a receive, and close their descriptors on this thread.
        let _ = rustix::net::sockopt::set_socket_oobinline(&socket, true);
        Self { socket: Some(socket), closer, is_lent: false }
    }

    /// Sets whether another process also has the socket, and serves the peer on it.
    pub(crate) fn set_lent(&mut self, is_lent: bool) {
        self.is_lent = is_lent;
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_ref().expect("a stream has its socket until it is dropped").as_fd()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        if self.is_lent {
            // This may be the last descriptor of the socket, if the other process has ended. So the
            // closer closes it.
            return self.closer.close(Lane::Foreign, socket);
        }
        // After the shutdown, no more data can arrive. The peer sees the end before the socket is
        // closed.
        let _ = shutdown(&socket, Shutdown::Both);
        match rustix::io::ioctl_fionread(&socket) {
            Ok(0) => drop(socket),
            _ => self.closer.close(Lane::Foreign, socket),
        }
    }
}
