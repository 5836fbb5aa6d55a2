//! Signals to eventfds of untrusted peers, without ever blocking.
//!
//! A write to an eventfd blocks while its count is full, unless the open file is non-blocking. The
//! peer that sent the descriptor shares the open file, and can clear that flag and fill the count
//! at any moment, even just before the write. There is no kind of write that ignores the flag: the
//! kernel refuses `RWF_NOWAIT` for eventfds. But the kernel itself signals eventfds without
//! blocking: an io_uring signals its registered eventfd when a request completes, and a
//! no-operation completes at once. Each thread has a few rings for all eventfds, so the rings need
//! no descriptor per eventfd. A repeated signal to an eventfd costs one system call, like a write.
//! To change the eventfd of a ring costs two more.
//!
//! Linux AIO is used if io_uring is not permitted, or if the kernel is older than 5.19: in older
//! kernels, a change of a ring's eventfd waits for all processors. AIO is the second choice,
//! because a process with an AIO context does not end until the kernel has waited for all
//! processors twice (35 ms, measured under load), and the process that recovers its controllers has
//! to wait for that end.

mod aio;
mod id;
mod ring;

pub(crate) use id::Id;
use rustix::io::{Errno, write};
use std::os::fd::BorrowedFd;

/// True if eventfds can be signalled by io_uring or AIO.
pub(crate) fn is_available() -> bool {
    ring::is_available() || aio::is_available()
}

/// Creates up to `count` io_uring instances for signals to peers' eventfds, and all other objects
/// that the signals need. Must be called before the process enters its system call filter. No
/// instance is created later. Threads without an instance share one. Returns the number of
/// instances. 0 means that AIO is used: then the filter has to permit the system calls `io_submit`
/// and `io_getevents`.
pub fn prepare(count: usize) -> usize {
    let made = ring::prepare(count);
    if made == 0 {
        // Creates the AIO context.
        aio::is_available();
    }
    made
}

/// Signals the eventfd with the identity `id`. Has no effect if the descriptor is no eventfd, or if
/// neither io_uring nor AIO [is available](is_available).
pub(crate) fn notify(event: BorrowedFd<'_>, id: &Id) {
    if !ring::is_available() || !ring::notify(event, id) {
        aio::notify(event);
    }
}

/// Adds one to the count of an eventfd by a write. The caller makes sure that the write cannot
/// block.
pub(crate) fn raise(fd: BorrowedFd<'_>) {
    while let Err(Errno::INTR) = write(fd, &1u64.to_ne_bytes()) {}
}
