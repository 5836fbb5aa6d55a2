//! What the descriptors are that a peer sends, found out without asking whoever is behind them.
//!
//! A peer can serve a file system of its own (FUSE), or sit on a slow one of somebody else's. A
//! descriptor from there turns nearly every system call into a question that its daemon answers
//! when it likes: mapping the file and touching the pages, `fstat`, and `close` itself. Whoever
//! asks waits, and so does every other peer that is served by the same thread.
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
//! From the moment in which it is received, a descriptor is in a [`PeerFd`], which never closes it
//! on the thread that drops it. (A descriptor that passes is not closed in no time either: see
//! [`Closer`].)
//!
//! Everything else is [`Descriptor::Foreign`], and closed by somebody who has time: sockets (which
//! may hold descriptors themselves), pipes, devices, epoll, io_uring and userfaultfd instances, DMA
//! buffers, secret memory, a guest's private memory, and files of FUSE, network file systems,
//! overlays (whose layers may be of those) and mounts of other namespaces. Without `/proc`, only
//! memory passes, so that no interrupts can be set up.

mod channel;
mod closer;
mod inspector;
mod kind;
mod peer_fd;
#[allow(unsafe_code)]
pub(crate) mod sys;

pub use channel::Channel;
pub use closer::Closer;
pub(crate) use closer::Stream;
pub use inspector::Descriptor;
pub(crate) use inspector::{Inspector, SavedDescriptor};
pub use peer_fd::PeerFd;
