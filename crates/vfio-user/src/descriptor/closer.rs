//! Threads that close descriptors and mappings whose close may block.
//!
//! `close` frees the descriptor number at once, and then may wait for a user-space file system
//! (FUSE's FLUSH). For memory and eventfds it waits only for the kernel, but a peer can make that
//! slow: it frees the pages of a file without other users, a million file locks, or each epoll
//! instance that contains the eventfd. So descriptors are closed on threads that are started on
//! demand.
//!
//! # Isolation
//!
//! Each served device has its own closer, so a peer cannot delay the closes of other devices. A
//! closer has at most three threads, one per [`Lane`]: a file whose FUSE daemon never answers
//! delays other foreign descriptors, but not the memory of the next client. (A thread for each
//! descriptor would also work, but costs more than a descriptor.)
//!
//! # Limits
//!
//! If more than [`MAX_FOREIGN`] foreign descriptors wait to be closed, the client is dropped, and
//! the next client of the device has to wait until there are fewer. If more than [`MAX_CLOSING`]
//! others wait, nothing is received from the client until there are fewer. So a client's
//! descriptors never cost the process more than these limits and the descriptors of one more
//! message. Mapped memory is limited by its address space, which is accounted until the memory is
//! unmapped.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::net::{Shutdown, shutdown};
use tracing::warn;

/// Maximum number of foreign descriptors of a device's clients that may wait to be closed.
const MAX_FOREIGN: usize = 16;

/// Maximum number of memory and eventfd descriptors that may wait to be closed.
const MAX_CLOSING: usize = 64;

/// Time without work after which a thread ends.
const IDLE: Duration = Duration::from_secs(1);

/// Class of closes, by what they may wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// Descriptors whose close may block indefinitely.
    Foreign,
    /// Descriptors of memory, and eventfds.
    Known,
    /// Mapped memory, and other objects whose drop takes long but ends.
    Memory,
}

/// Closes descriptors, and drops other objects whose drop may block, on its own threads.
#[derive(Default)]
pub struct Closer {
    /// True if there are no threads: objects are closed by the caller.
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
    /// Callback to run when the number is within the limit.
    room: Option<Box<dyn FnOnce() + Send>>,
}

impl Queue {
    fn count(&self) -> usize {
        self.waiting.len() + usize::from(self.closing)
    }
}

impl Closer {
    /// Creates a closer with threads, or, if `at_once`, one that closes on the caller's thread.
    pub(crate) fn new(at_once: bool) -> Self {
        Self { at_once, ..Self::default() }
    }

    /// Drops `what` on a thread. The drop may take long, but must end (mapped memory).
    pub fn drop_later(self: &Arc<Self>, what: Box<dyn Any + Send>) {
        self.add(Lane::Memory, what);
    }

    pub(super) fn close(self: &Arc<Self>, lane: Lane, fd: OwnedFd) {
        self.add(lane, Box::new(fd));
    }

    /// True if too many foreign descriptors wait to be closed. The next client has to wait then.
    pub fn is_overloaded(self: &Arc<Self>) -> bool {
        let mut queue = self.foreign.lock();
        self.start(Lane::Foreign, &mut queue);
        queue.count() > MAX_FOREIGN
    }

    /// True if too many memory and eventfd descriptors wait to be closed: nothing may be received
    /// until there are fewer. Then `room` is called, on another thread.
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
            // The waiting objects count for the limits, and the next call tries again.
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

/// Connected socket. Closing a socket closes its unreceived data, which may contain descriptors: if
/// there are unreceived data, a [`Closer`] closes the socket.
#[derive(Debug)]
pub(crate) struct Stream {
    /// `Some` until the drop.
    socket: Option<OwnedFd>,
    closer: Arc<Closer>,
    /// True if another process serves the peer on the same socket: the drop must not shut it down.
    is_lent: bool,
}

impl Stream {
    pub(crate) fn new(socket: OwnedFd, closer: Arc<Closer>) -> Self {
        // The kernel would discard out-of-band data during a receive, with their descriptors.
        // Inline they are received like other data.
        let _ = rustix::net::sockopt::set_socket_oobinline(&socket, true);
        Self { socket: Some(socket), closer, is_lent: false }
    }

    /// Sets whether another process has the socket too, and serves the peer if this one does not.
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
            // The other process may have ended: then this is the last descriptor of the socket.
            return self.closer.close(Lane::Foreign, socket);
        }
        // No more data can arrive, and the peer sees the end before the socket is closed.
        let _ = shutdown(&socket, Shutdown::Both);
        match rustix::io::ioctl_fionread(&socket) {
            Ok(0) => drop(socket),
            _ => self.closer.close(Lane::Foreign, socket),
        }
    }
}
