//! A client's socket that a thread other than the server's may poll as well: what a
//! [`Device`](crate::Device) is given by [`share_socket`](crate::Device::share_socket).
//!
//! How the two of them get along is described in `server/attachment.rs`.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// What a call of [`SharedSocket::poll_writes`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolledWrites {
    /// Writes that were taken.
    pub writes: u32,
    /// There was no more. Otherwise the server's thread handles what is left.
    pub all: bool,
}

/// The server's side of a [`SharedSocket`].
pub(crate) trait SocketOwner: Send + Sync {
    /// See [`SharedSocket::watch`].
    fn watch(&self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()>;

    /// See [`SharedSocket::poll_writes`].
    fn poll_writes(&self, write: &mut dyn FnMut(u32, u64, &[u8]) -> bool) -> PolledWrites;

    /// The [`SharedSocket`] was dropped.
    fn give_back(&self);
}

/// The socket of a connection: lets a thread that sleeps in an epoll instance of its own wake up
/// at the client's messages, and take those that are only meant to wake it. A device gets one by
/// [`share_socket`](crate::Device::share_socket).
///
/// Dropping it gives it back. It is of no use any more when the client has left.
pub struct SharedSocket(Arc<dyn SocketOwner>);

impl SharedSocket {
    pub(crate) fn new(owner: Arc<dyn SocketOwner>) -> Self {
        Self(owner)
    }

    /// Reports messages to `epoll` as `token` from now on, edge-triggered. To be called once.
    ///
    /// # Errors
    ///
    /// The system's; or the server has something to do at the connection just now.
    pub fn watch(&self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        self.0.watch(epoll, token)
    }

    /// To be called for each such report: offers `write` a few of the writes that have come, by
    /// region, offset and data. It carries one out and returns true, or leaves it alone and returns
    /// false: that one, and all that follows, is then handled by the server's thread.
    pub fn poll_writes(&self, write: &mut dyn FnMut(u32, u64, &[u8]) -> bool) -> PolledWrites {
        self.0.poll_writes(write)
    }
}

impl Drop for SharedSocket {
    fn drop(&mut self) {
        self.0.give_back();
    }
}

impl std::fmt::Debug for SharedSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedSocket")
    }
}
