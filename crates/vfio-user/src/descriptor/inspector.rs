//! Classification of received descriptors.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::closer::Closer;
use super::kind::{Kind, kind};
use super::peer_fd::PeerFd;
use crate::log_limit::LogLimit;

/// Descriptor that a peer has sent.
#[derive(Debug)]
pub enum Descriptor {
    /// An eventfd.
    Event(PeerFd),
    /// Memory, or a file on a local disk. Accesses to it cannot block indefinitely.
    Memory(PeerFd),
    /// Any other descriptor. The closer has already received it.
    Foreign,
}

/// Maximum number of descriptors that are inspected per receive. A message with more ends the
/// connection.
const MAX_INSPECTED: usize = 32;

/// Inspector of the descriptors of one peer.
#[derive(Debug)]
pub(crate) struct Inspector {
    closer: Arc<Closer>,
    log: Arc<LogLimit>,
}

impl Inspector {
    pub(crate) fn new(closer: Arc<Closer>, log: Arc<LogLimit>) -> Self {
        Self { closer, log }
    }

    pub(crate) fn closer(&self) -> &Arc<Closer> {
        &self.closer
    }

    /// Inspects the descriptors of one receive. At most one descriptor may be a file on a disk;
    /// further files are classified as foreign.
    pub(crate) fn inspect(&self, fds: Vec<PeerFd>) -> Vec<Descriptor> {
        // One file is enough, because no request has two. Looking up the mount of a file is slow if
        // there are thousands of mounts.
        self.inspect_all(fds, false)
    }

    /// Inspects the descriptors of one receive. Any number of them may be files on disks. Used only
    /// by threads that serve a single peer, because the inspection may be slow.
    pub(super) fn inspect_files(&self, fds: Vec<PeerFd>) -> Vec<Descriptor> {
        self.inspect_all(fds, true)
    }

    fn inspect_all(&self, fds: Vec<PeerFd>, files: bool) -> Vec<Descriptor> {
        let mut may_search = true;
        let look = |(at, fd): (usize, PeerFd)| {
            if at >= MAX_INSPECTED {
                return Descriptor::Foreign;
            }
            match kind(fd.as_fd(), &mut may_search) {
                Ok(Kind::Event) => Descriptor::Event(fd.known()),
                Ok(Kind::Memory) => {
                    may_search |= files;
                    Descriptor::Memory(fd.known())
                }
                Err(what) => {
                    self.log.warn(format_args!(
                        "the peer sent {what}, which is refused: share a memfd, or a file on \
                         tmpfs, hugetlbfs or a local disk"
                    ));
                    Descriptor::Foreign
                }
            }
        };
        fds.into_iter().enumerate().map(look).collect()
    }
}
