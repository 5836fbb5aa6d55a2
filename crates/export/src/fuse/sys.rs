//! System calls that read requests from `/dev/fuse` and write answers to it, one call each.

use crate::vectors::{Part, Room};
use rustix::io::Errno;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Offset for `preadv2` and `pwritev2` on a device without a position. The calls then equal `readv`
/// and `writev`, which the sandbox of a server does not allow.
const NO_OFFSET: i64 = -1;

/// Reads a request: its header into `head`, and the rest into `rest`.
pub(super) fn read(
    device: BorrowedFd<'_>,
    head: &mut Room<'_>,
    rest: &mut Room<'_>,
) -> Result<usize, Errno> {
    let vectors = [head.vector, rest.vector];
    // SAFETY: each vector belongs to a room that is borrowed until the call returns. The room is
    // either memory that is borrowed for writing, or writable shared memory. The mapping of shared
    // memory is borrowed, and no Rust reference points into it.
    let count = unsafe { libc::preadv2(device.as_raw_fd(), vectors.as_ptr(), 2, NO_OFFSET, 0) };
    usize::try_from(count).map_err(|_| last_error())
}

/// Writes a complete answer. The kernel accepts all of it or none.
pub(super) fn write(device: BorrowedFd<'_>, head: &[u8], data: Part<'_>) -> Result<(), Errno> {
    let vectors = [Part::of(head).vector, data.vector];
    // SAFETY: each vector belongs to a part, and its bytes or its mapping are borrowed until the
    // call returns. The kernel only reads the bytes. If shared memory was lost, the call returns an
    // error.
    let count = unsafe { libc::pwritev2(device.as_raw_fd(), vectors.as_ptr(), 2, NO_OFFSET, 0) };
    usize::try_from(count).map(drop).map_err(|_| last_error())
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}
