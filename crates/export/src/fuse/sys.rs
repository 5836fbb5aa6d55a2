//! Requests are read from `/dev/fuse`, and answers written to it, each with one call.

use crate::vectors::{Part, Room};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Reads a request: its head into the one and what follows into the other.
pub(super) fn read(
    device: BorrowedFd<'_>,
    head: &mut Room<'_>,
    rest: &mut Room<'_>,
) -> Result<usize, Errno> {
    let vectors = [head.vector, rest.vector];
    // SAFETY: each vector is that of a room, which is borrowed for writing or is writable memory
    // whose mapping is borrowed, until the call returns. No Rust reference points into the latter.
    let count = unsafe { libc::readv(device.as_raw_fd(), vectors.as_ptr(), 2) };
    usize::try_from(count).map_err(|_| last_error())
}

/// Writes an answer: all of it or nothing.
pub(super) fn write(device: BorrowedFd<'_>, head: &[u8], data: Part<'_>) -> Result<(), Errno> {
    let vectors = [Part::of(head).vector, data.vector];
    // SAFETY: each vector is that of a part, whose bytes are borrowed, or whose mapping is, until
    // the call returns. The kernel reads them, and memory that is gone is an error of the call.
    let count = unsafe { libc::writev(device.as_raw_fd(), vectors.as_ptr(), 2) };
    usize::try_from(count).map(drop).map_err(|_| last_error())
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
