//! Closing what may take forever to be closed.
//!
//! `close` gives the number of the descriptor back at once, and then waits for whoever has to
//! answer it (FUSE's FLUSH). Of memory and eventfds it waits for the kernel alone, but not shortly
//! if the peer so wishes: for the pages of a file that nobody else has any more, for a million file
//! locks, for each epoll instance that the eventfd was in. So it happens on threads that come and
//! go with the need for them.
//!
//! # Who waits for whom
//!
//! Each device that is served has a closer of its own, so what one peer has sent holds up nobody
//! else's. Within it there are three threads at most, by what they wait for ([`Lane`]): a file
//! whose daemon never answers holds up others of its kind, and not the memory of the client that
//! comes next. A thread for each descriptor would do as well, but a thread costs more than a
//! descriptor.
//!
//! # How many there are
//!
//! With more than [`MAX_FOREIGN`] that could wait for somebody, the client is dropped, and no other
//! is let in at that socket until there are fewer. With more than [`MAX_CLOSING`] others, nothing
//! is read from the client until there are fewer. Thus a client's descriptors cost the process no
//! more than these, and those of one more message. Memory counts for what it takes of the address
//! space until it is given back.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use rustix::net::{Shutdown, shutdown};
use tracing::warn;

/// So many descriptors of a device's clients that nobody answers for may wait to be closed.
const MAX_FOREIGN: usize = 16;

/// So many descriptors of memory and eventfds.
const MAX_CLOSING: usize = 64;

/// How long a thread waits for more before it ends.
const IDLE: Duration = Duration::from_secs(1);

/// What it takes to be rid of something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    /// A descriptor that could make us wait for whoever.
    Foreign,
    /// A descriptor of memory, or an eventfd.
    Known,
    /// Memory that is mapped, and what else takes time and ends.
    Memory,
}

/// Closes descriptors, and drops whatever else takes its time, without its user waiting for it.
#[derive(Default)]
pub struct Closer {
    /// There are no threads: all is closed where it is found.
    at_once: bool,
    foreign: Mutex<Queue>,
    known: Mutex<Queue>,
    memory: Mutex<Queue>,
    wake: [Condvar; 3],
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Box<dyn Any + Send>>,
    /// A thread is at it.
    at_work: bool,
    /// It is closing one, or waits for that.
    closing: bool,
    /// To be called when there are few enough.
    room: Option<Box<dyn FnOnce() + Send>>,
}

impl Queue {
    fn count(&self) -> usize {
        self.waiting.len() + usize::from(self.closing)
    }
}

impl Closer {
    /// One with threads, or one that closes everything where it is found.
    pub(crate) fn new(at_once: bool) -> Self {
        Self { at_once, ..Self::default() }
    }

    /// Drops `what` some time, which may take a while, but ends: memory that is mapped.
    pub fn drop_later(self: &Arc<Self>, what: Box<dyn Any + Send>) {
        self.add(Lane::Memory, what);
    }

    pub(super) fn close(self: &Arc<Self>, lane: Lane, fd: OwnedFd) {
        self.add(lane, Box::new(fd));
    }

    /// Whether more of those that nobody answers for wait than is allowed: then the next client
    /// has to wait, too.
    pub fn is_overloaded(self: &Arc<Self>) -> bool {
        let mut queue = self.foreign.lock();
        self.start(Lane::Foreign, &mut queue);
        queue.count() > MAX_FOREIGN
    }

    /// Whether so many wait that nothing is to be received before there are fewer; `room` is called
    /// then, on another thread.
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
            // They count, and somebody will come and try again.
            Err(error) => warn!("no thread to close a peer's descriptors: {error}"),
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

/// A connected socket. Closing one closes what its peer has sent and nobody has received, which may
/// be descriptors: if there is anything of that kind, it is left to a [`Closer`].
#[derive(Debug)]
pub(crate) struct Stream {
    /// There until it is dropped.
    socket: Option<OwnedFd>,
    closer: Arc<Closer>,
    /// Another process serves the peer by the same socket: dropping this must not end it.
    is_lent: bool,
}

impl Stream {
    pub(crate) fn new(socket: OwnedFd, closer: Arc<Closer>) -> Self {
        // What is sent out of band would be thrown away by the receive that passes over it,
        // descriptors and all. In line it is received like everything else.
        let _ = rustix::net::sockopt::set_socket_oobinline(&socket, true);
        Self { socket: Some(socket), closer, is_lent: false }
    }

    /// Says whether another process has the socket too, and goes on if this one does not.
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
            // The other process may be gone meanwhile, and this be the last descriptor.
            return self.closer.close(Lane::Foreign, socket);
        }
        // Nothing more can come now, and the peer knows that it is over, whenever it is closed.
        let _ = shutdown(&socket, Shutdown::Both);
        match rustix::io::ioctl_fionread(&socket) {
            Ok(0) => drop(socket),
            _ => self.closer.close(Lane::Foreign, socket),
        }
    }
}
