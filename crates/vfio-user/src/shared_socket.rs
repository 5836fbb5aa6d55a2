//! Socket of a client that a second thread polls in addition to the reactor. A
//! [`Device`](crate::Device) gets it by [`share_socket`](crate::Device::share_socket).
//!
//! `server/attachment.rs` describes the protocol between the reactor and the second thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Result of [`SharedSocket::poll_writes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolledWrites {
    /// Number of writes that were handled.
    pub writes: u32,
    /// True if all received data were handled. Otherwise the reactor handles the rest.
    pub all: bool,
}

/// Server side of a [`SharedSocket`].
pub(crate) trait SocketOwner: Send + Sync {
    /// See [`SharedSocket::watch`].
    fn watch(&self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()>;

    /// See [`SharedSocket::poll_writes`].
    fn poll_writes(&self, write: &mut dyn FnMut(u32, u64, &[u8]) -> bool) -> PolledWrites;

    /// Called when the [`SharedSocket`] is dropped.
    fn stop_sharing(&self);
}

/// Socket of a client that a second thread polls in addition to the reactor. The client's messages
/// wake the second thread through its own epoll instance. That thread handles doorbell writes; the
/// reactor handles all other messages. A device gets the socket by
/// [`share_socket`](crate::Device::share_socket).
///
/// When the value is dropped, only the reactor polls the socket. When the client has disconnected,
/// the value has no effect any more.
pub struct SharedSocket(Arc<dyn SocketOwner>);

impl SharedSocket {
    pub(crate) fn new(owner: Arc<dyn SocketOwner>) -> Self {
        Self(owner)
    }

    /// Adds the socket to `epoll` with `token`, edge-triggered. The caller may do this once.
    ///
    /// # Errors
    ///
    /// The system call failed, or the reactor is using the connection at the moment.
    pub fn watch(&self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        self.0.watch(epoll, token)
    }

    /// Handles received writes, after an event of the socket. Calls `write` for each, with region,
    /// offset and data. If `write` returns true, it has executed the write. If it returns false,
    /// the reactor handles this write and all later messages.
    pub fn poll_writes(&self, write: &mut dyn FnMut(u32, u64, &[u8]) -> bool) -> PolledWrites {
        self.0.poll_writes(write)
    }
}

impl Drop for SharedSocket {
    fn drop(&mut self) {
        self.0.stop_sharing();
    }
}

impl std::fmt::Debug for SharedSocket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SharedSocket")
    }
}
