//! Closing what may take forever to be closed.
//!
//! `close` gives the number of the descriptor back at once, and then waits for whoever has to
//! answer it (FUSE's FLUSH). So it happens on a thread that comes and goes with the need for it.
//! There is one for each device that is served and no more: a client that brings descriptors which
//! can not be closed holds up that thread and no other, and the descriptors that wait for it are
//! counted. With more than [`MAX_WAITING`] of them the client is dropped, and no other is let in at
//! that socket until there are fewer. Thus a client's descriptors cost the process no more than a
//! thread, that many descriptors, and those of one more message.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::net::{Shutdown, shutdown};
use tracing::warn;

/// So many descriptors of a device's clients may wait to be closed.
const MAX_WAITING: usize = 16;

/// Closes descriptors, one after the other, without its user waiting for it.
#[derive(Default)]
pub struct Closer(Mutex<CloserState>);

#[derive(Default)]
struct CloserState {
    waiting: VecDeque<OwnedFd>,
    /// A thread is at it.
    at_work: bool,
    /// It is closing one, or waits for that.
    closing: bool,
}

impl CloserState {
    fn count(&self) -> usize {
        self.waiting.len() + usize::from(self.closing)
    }
}

impl Closer {
    /// Closes `fd` some time.
    pub(crate) fn close(self: &Arc<Self>, fd: OwnedFd) {
        let mut state = self.0.lock();
        state.waiting.push_back(fd);
        self.start(&mut state);
    }

    /// Whether more of them wait than is allowed: then the next client has to wait, too.
    pub fn is_overloaded(self: &Arc<Self>) -> bool {
        let mut state = self.0.lock();
        self.start(&mut state);
        state.count() > MAX_WAITING
    }

    fn start(self: &Arc<Self>, state: &mut CloserState) {
        if state.at_work || state.waiting.is_empty() {
            return;
        }
        let closer = Arc::clone(self);
        let thread = std::thread::Builder::new().name("closer".into());
        match thread.spawn(move || closer.work()) {
            Ok(_) => state.at_work = true,
            // They count, and somebody will come and try again.
            Err(error) => warn!("no thread to close a peer's descriptors: {error}"),
        }
    }

    fn work(&self) {
        let mut state = self.0.lock();
        while let Some(fd) = state.waiting.pop_front() {
            state.closing = true;
            drop(state);
            drop(fd);
            state = self.0.lock();
            state.closing = false;
        }
        state.at_work = false;
    }
}

impl fmt::Debug for Closer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.lock().count();
        f.debug_struct("Closer").field("count", &count).finish_non_exhaustive()
    }
}

/// A connected socket. Closing one closes what its peer has sent and nobody has received, which may
/// be descriptors: if there is anything of that kind, it is left to a [`Closer`].
#[derive(Debug)]
pub(crate) struct Stream {
    /// There until it is dropped.
    socket: Option<OwnedFd>,
    closer: Arc<Closer>,
}

impl Stream {
    pub(crate) fn new(socket: OwnedFd, closer: Arc<Closer>) -> Self {
        // What is sent out of band would be thrown away by the receive that passes over it,
        // descriptors and all. In line it is received like everything else.
        let _ = rustix::net::sockopt::set_socket_oobinline(&socket, true);
        Self { socket: Some(socket), closer }
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
        // Nothing more can come now, and the peer knows that it is over, whenever it is closed.
        let _ = shutdown(&socket, Shutdown::Both);
        match rustix::io::ioctl_fionread(&socket) {
            Ok(0) => drop(socket),
            _ => self.closer.close(socket),
        }
    }
}
