//! Classification of received descriptors, without calls that may block.
//!
//! A peer can serve its own file system (FUSE), or use a slow one. A descriptor of such a file
//! makes most system calls depend on a daemon that may never answer: accesses to a mapping,
//! `fstat`, and `close` itself. A blocked call would block the thread, and with it all other peers
//! of that thread.
//!
//! Therefore each descriptor is inspected when it is received, only with calls that the kernel
//! answers itself: `F_GET_SEALS`, `FIOQSIZE`, and the links and tables of `/proc/self`. Accepted
//! are:
//!
//! | descriptor | criterion |
//! |---|---|
//! | memory: memfd, file of tmpfs (`/dev/shm`) or hugetlbfs, in any mount namespace | has seals |
//! | eventfd | link in `/proc/self/fd` |
//! | file on a local disk | regular file on a mount of a known type, visible to this process |
//!
//! A received descriptor is immediately wrapped in a [`PeerFd`], which never closes it on the
//! dropping thread. (Closing an accepted descriptor may take long, too: see [`Closer`].)
//!
//! Every other descriptor is [`Descriptor::Foreign`] and closed by the [`Closer`]: sockets (which
//! may contain descriptors themselves), pipes, devices, epoll, io_uring and userfaultfd instances,
//! DMA buffers, secret memory, a guest's private memory, and files of FUSE, network file systems,
//! overlays (whose layers may be such files) and mounts of other namespaces. Without `/proc` only
//! memory is accepted, so interrupts cannot be set up.

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
