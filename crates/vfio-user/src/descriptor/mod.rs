//! Classification of received descriptors, with system calls that never block.
//!
//! A peer can serve its own file system (FUSE), or use a slow one. For a descriptor of a file on
//! it, most system calls depend on a daemon that may never reply: accesses to a mapping, `fstat`,
//! and even `close`. A blocked call would block the thread and all other peers that it serves.
//!
//! Therefore each descriptor is inspected on receipt, and only with calls that the kernel handles
//! without a file system: `F_GET_SEALS`, `FIOQSIZE`, and the links and tables of `/proc/self`.
//! These descriptors are accepted:
//!
//! | descriptor | criterion |
//! |---|---|
//! | memory: memfd, file of tmpfs (`/dev/shm`) or hugetlbfs, in any mount namespace | has seals |
//! | eventfd | link in `/proc/self/fd` |
//! | file on a local disk | regular file on a mount of a known type, visible to this process |
//!
//! A received descriptor is immediately wrapped in a [`PeerFd`], and the thread that drops a
//! [`PeerFd`] does not close it. The [`Closer`] closes accepted descriptors too, because their
//! close may take long.
//!
//! Every other descriptor is [`Descriptor::Foreign`], and the [`Closer`] closes it. Foreign
//! descriptors are: sockets (which may contain descriptors themselves), pipes, devices, epoll,
//! io_uring and userfaultfd instances, DMA buffers, secret memory, a guest's private memory, and
//! files of FUSE, of network file systems, of overlays (whose layers may be on these file systems)
//! and of mounts in other namespaces. Without `/proc`, only memory is accepted, so interrupts
//! cannot be set up.

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
pub(crate) use inspector::Inspector;
pub use peer_fd::PeerFd;
