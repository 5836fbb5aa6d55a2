//! The one way to hold a descriptor that a peer sent.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::closer::{Closer, Lane};

/// A descriptor that a peer sent. Dropping it waits for nobody: a [`Closer`] closes it.
///
/// There is no way to the `OwnedFd` in it, so nobody can close it by mistake. What has to outlive
/// it shares it (`Arc<PeerFd>`).
pub struct PeerFd {
    /// There until it is dropped.
    fd: Option<OwnedFd>,
    closer: Arc<Closer>,
    lane: Lane,
}

impl PeerFd {
    /// Holds a descriptor from the moment in which it was received. (What this crate receives, it
    /// holds so already.)
    #[must_use]
    pub fn new(fd: OwnedFd, closer: &Arc<Closer>) -> Self {
        Self { fd: Some(fd), closer: Arc::clone(closer), lane: Lane::Foreign }
    }

    /// Holds a descriptor that a predecessor of ours has received and found to be memory or an
    /// eventfd.
    #[must_use]
    pub fn of_predecessor(fd: OwnedFd, closer: &Arc<Closer>) -> Self {
        Self::new(fd, closer).known()
    }

    /// It is memory or an eventfd: closing it waits for the kernel alone.
    pub(super) fn known(mut self) -> Self {
        self.lane = Lane::Known;
        self
    }

    /// Who closes it, and may be given what else came of it.
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
