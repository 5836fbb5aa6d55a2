//! Signalling an eventfd of somebody else's.
//!
//! A write to an eventfd waits while the count is full, unless its open file is non-blocking; and
//! the open file is shared with whoever sent the descriptor, who can clear that flag and fill the
//! count at any moment, the last one before the write included. There is no write that does not
//! wait whatever the flag says: `RWF_NOWAIT` is refused for eventfds. But the kernel itself signals
//! without ever waiting. So it is asked to: an io_uring has an eventfd that it signals when
//! something completes, and a no-operation completes at once. Each thread has a few rings for all
//! eventfds: so what a peer sends costs no descriptor, and an eventfd that is signalled again
//! costs one system call, as a write would. To change the eventfd of a ring costs two more.
//!
//! Where io_uring may not be used, or is that of a kernel before 5.19, in which a change of the
//! eventfd waits for all processors, Linux AIO does it. It is not the first choice: a process that
//! has such a context does not end until the kernel has waited for all processors twice, 35 ms here
//! under load, and whoever goes on in its place has to wait for its end.

mod aio;
mod id;
mod ring;

pub(crate) use id::Id;
use rustix::io::{Errno, write};
use std::os::fd::BorrowedFd;

/// Whether eventfds can be signalled so.
pub(crate) fn is_available() -> bool {
    ring::is_available() || aio::is_available()
}

/// Signals an eventfd, whoever has it. Does nothing if it is none, or if this
/// [is not available](is_available). `id` is that of this eventfd and of no other.
pub(crate) fn notify(event: BorrowedFd<'_>, id: &Id) {
    if !ring::is_available() || !ring::notify(event, id) {
        aio::notify(event);
    }
}

/// Adds one to the count of an eventfd that takes a write at once.
pub(crate) fn raise(fd: BorrowedFd<'_>) {
    while let Err(Errno::INTR) = write(fd, &1u64.to_ne_bytes()) {}
}
