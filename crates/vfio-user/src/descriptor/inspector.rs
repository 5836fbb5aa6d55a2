//! What a descriptor that a peer sent is good for.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shadowbell_state::{Descriptors, FdRef, StateError};

use super::closer::Closer;
use super::kind::{Kind, kind};
use super::peer_fd::PeerFd;
use crate::log_limit::LogLimit;

/// A descriptor that a peer sent.
#[derive(Debug)]
pub enum Descriptor {
    /// An eventfd.
    Event(PeerFd),
    /// A file that answers: memory, or a file on a local disk.
    Memory(PeerFd),
    /// Something else. It is being closed already.
    Foreign,
}

/// A [`Descriptor`] on its way to a successor.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum SavedDescriptor {
    Event(FdRef),
    Memory(FdRef),
    Foreign,
}

impl Descriptor {
    pub(crate) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedDescriptor> {
        let mut add = |fd: &PeerFd| fd.as_fd().try_clone_to_owned().map(|fd| fds.add(fd));
        Ok(match self {
            Self::Event(fd) => SavedDescriptor::Event(add(fd)?),
            Self::Memory(fd) => SavedDescriptor::Memory(add(fd)?),
            Self::Foreign => SavedDescriptor::Foreign,
        })
    }

    pub(crate) fn restore(
        saved: SavedDescriptor,
        fds: &mut Descriptors,
        closer: &Arc<Closer>,
    ) -> Result<Self, StateError> {
        let mut take = |fd| fds.take(fd).map(|fd| PeerFd::of_predecessor(fd, closer));
        Ok(match saved {
            SavedDescriptor::Event(fd) => Self::Event(take(fd)?),
            SavedDescriptor::Memory(fd) => Self::Memory(take(fd)?),
            SavedDescriptor::Foreign => Self::Foreign,
        })
    }
}

/// Of so many descriptors that come at once, each is looked at. With more the connection ends.
const LOOKED_AT: usize = 32;

/// Looks at what one peer sends.
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

    /// Looks at descriptors that came together, of which at most one may be a file on a disk.
    pub(crate) fn inspect(&self, fds: Vec<PeerFd>) -> Vec<Descriptor> {
        // Looking for a mount takes its time where there are thousands; no request has two files.
        self.look_at(fds, false)
    }

    /// Looks at descriptors that came together, any number of which may be files on disks: for a
    /// thread that serves nobody else.
    pub(super) fn inspect_files(&self, fds: Vec<PeerFd>) -> Vec<Descriptor> {
        self.look_at(fds, true)
    }

    fn look_at(&self, fds: Vec<PeerFd>, files: bool) -> Vec<Descriptor> {
        let mut may_search = true;
        let look = |(at, fd): (usize, PeerFd)| {
            if at >= LOOKED_AT {
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
                        "the peer sent {what}, which is refused: what it shares has to be a memfd, \
                         or a file of tmpfs, hugetlbfs or a local disk"
                    ));
                    Descriptor::Foreign
                }
            }
        };
        fds.into_iter().enumerate().map(look).collect()
    }
}
