//! Owner of a descriptor that was received from a peer.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::closer::{Closer, Lane};

/// Descriptor that a peer has sent. Dropping it never blocks, because a [`Closer`] closes it.
///
/// The `OwnedFd` inside is private, so that no other code closes it by mistake. An object that
/// needs the descriptor for longer shares it (`Arc<PeerFd>`).
pub struct PeerFd {
    /// The descriptor; `None` only during the drop.
    fd: Option<OwnedFd>,
    closer: Arc<Closer>,
    lane: Lane,
}

impl PeerFd {
    /// Wraps a descriptor. A program that receives descriptors itself must call this immediately
    /// after the receipt. Descriptors that this crate receives are already wrapped.
    #[must_use]
    pub fn new(fd: OwnedFd, closer: &Arc<Closer>) -> Self {
        Self { fd: Some(fd), closer: Arc::clone(closer), lane: Lane::Foreign }
    }

    /// Wraps a descriptor that the previous server process has received and accepted as memory or
    /// an eventfd.
    #[must_use]
    pub fn of_predecessor(fd: OwnedFd, closer: &Arc<Closer>) -> Self {
        Self::new(fd, closer).known()
    }

    /// Marks the descriptor as memory or an eventfd, whose close waits only for the kernel.
    pub(super) fn known(mut self) -> Self {
        self.lane = Lane::Known;
        self
    }

    /// Closer of the descriptor. It may also close objects that were created from the descriptor.
    #[must_use]
    pub fn closer(&self) -> &Arc<Closer> {
        &self.closer
    }
}

impl AsFd for PeerFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("a descriptor is there until it is dropped").as_fd()
    }
}

impl Drop for PeerFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.closer.close(self.lane, fd);
        }
    }
}

impl fmt::Debug for PeerFd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PeerFd").field(&self.fd).finish()
    }
}
