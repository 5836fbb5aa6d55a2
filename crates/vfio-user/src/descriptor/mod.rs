//! What the descriptors are that a peer sends, found out without asking whoever is behind them.
//!
//! A peer can serve a file system of its own (FUSE), or sit on a slow one of somebody else's. A
//! descriptor from there turns nearly every system call into a question that its daemon answers when
//! it likes: mapping the file and touching the pages, `fstat`, and `close` itself. Whoever asks waits,
//! and so does every other peer that is served by the same thread.
//!
//! So each descriptor is looked at as it arrives, and only with calls that the kernel answers from
//! what it holds: `F_GET_SEALS`, `FIOQSIZE`, and the links and tables of `/proc/self`. What passes:
//!
//! | what | how it is known |
//! |---|---|
//! | memory: a memfd, a file of tmpfs (`/dev/shm`) or hugetlbfs, in whatever mount namespace | it has seals |
//! | an eventfd | its link in `/proc/self/fd` |
//! | a file on a local disk | it is a regular file, on a mount that this process sees, of one of a few types |
//!
//! Everything else is [`Descriptor::Foreign`], and closed by somebody who has time: sockets (which may
//! hold descriptors themselves), pipes, devices, epoll, io_uring and userfaultfd instances, DMA
//! buffers, secret memory, a guest's private memory, and files of FUSE, network file systems, overlays
//! (whose layers may be of those) and mounts of other namespaces. Without `/proc`, only memory passes,
//! so that no interrupts can be set up.

mod channel;
mod closer;
mod file;
mod kind;
#[allow(unsafe_code)]
mod sys;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tracing::{debug, warn};

pub use channel::Channel;
pub use closer::Closer;
pub(crate) use closer::Stream;
pub use file::{PeerFile, let_go};
use kind::{Kind, kind};

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

impl Descriptor {
    /// The descriptor, whatever it is good for.
    pub fn into_fd(self) -> Option<OwnedFd> {
        match self {
            Self::Event(fd) => Some(fd),
            Self::Memory(file) => Some(file.keep()),
            Self::Foreign => None,
        }
    }
}

/// Looks at what one peer sends.
#[derive(Debug)]
pub(crate) struct Entrance {
    closer: Arc<Closer>,
    /// A foreign one was told of, which need not be repeated for each.
    told: bool,
}

impl Entrance {
    pub(crate) fn new(closer: Arc<Closer>) -> Self {
        Self { closer, told: false }
    }

    pub(crate) fn closer(&self) -> &Arc<Closer> {
        &self.closer
    }

    /// Looks at descriptors that came together.
    pub(crate) fn admit(&mut self, fds: Vec<OwnedFd>) -> Vec<Descriptor> {
        // Looking for a mount takes its time where there are thousands; no request has two files.
        self.look_at(fds, false)
    }

    /// The same, where any number of them may be files on disks: nobody else waits for that.
    fn admit_files(&mut self, fds: Vec<OwnedFd>) -> Vec<Descriptor> {
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
                    if std::mem::replace(&mut self.told, true) {
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
