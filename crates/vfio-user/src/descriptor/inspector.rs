//! What a descriptor that a peer sent is good for.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tracing::{debug, warn};

use super::closer::Closer;
use super::file::PeerFile;
use super::kind::{Kind, kind};

/// A descriptor that a peer sent.
#[derive(Debug)]
pub enum Descriptor {
    /// An eventfd.
    Event(OwnedFd),
    /// A file that answers: memory, or a file on a local disk.
    Memory(PeerFile),
    /// Something else. It is being closed already.
    Foreign,
}

/// Looks at what one peer sends.
#[derive(Debug)]
pub(crate) struct Inspector {
    closer: Arc<Closer>,
    /// A foreign one was warned of, which need not be repeated for each.
    has_warned: bool,
}

impl Inspector {
    pub(crate) fn new(closer: Arc<Closer>) -> Self {
        Self { closer, has_warned: false }
    }

    pub(crate) fn closer(&self) -> &Arc<Closer> {
        &self.closer
    }

    /// Looks at descriptors that came together, of which at most one may be a file on a disk.
    pub(crate) fn inspect(&mut self, fds: Vec<OwnedFd>) -> Vec<Descriptor> {
        // Looking for a mount takes its time where there are thousands; no request has two files.
        self.look_at(fds, false)
    }

    /// Looks at descriptors that came together, any number of which may be files on disks: for a
    /// thread that serves nobody else.
    pub(super) fn inspect_files(&mut self, fds: Vec<OwnedFd>) -> Vec<Descriptor> {
        self.look_at(fds, true)
    }

    fn look_at(&mut self, fds: Vec<OwnedFd>, files: bool) -> Vec<Descriptor> {
        let mut may_search = true;
        fds.into_iter()
            .map(|fd| match kind(fd.as_fd(), &mut may_search) {
                Ok(Kind::Event) => Descriptor::Event(fd),
                Ok(Kind::Memory) => {
                    may_search |= files;
                    Descriptor::Memory(PeerFile::new(fd))
                }
                Err(what) => {
                    if std::mem::replace(&mut self.has_warned, true) {
                        debug!("the peer sent {what}");
                    } else {
                        warn!(
                            "the peer sent {what}, which is refused: what it shares has to be a \
                             memfd, or a file of tmpfs, hugetlbfs or a local disk"
                        );
                    }
                    self.closer.close(fd);
                    Descriptor::Foreign
                }
            })
            .collect()
    }
}
