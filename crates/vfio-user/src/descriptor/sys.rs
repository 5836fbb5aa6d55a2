//! System calls that nobody has wrapped.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::Errno;

/// Whether `fd` is a regular file, a directory or a symbolic link, and not a device, a pipe, a
/// socket or anything else that has no size. The kernel tells from its own inode (`FIOQSIZE`) and
/// asks no file system.
pub(super) fn has_size(fd: BorrowedFd<'_>) -> bool {
    let mut size: libc::loff_t = 0;
    // SAFETY: FIOQSIZE writes one `loff_t`, for which there is room, and keeps no pointer.
    unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIOQSIZE, &raw mut size) == 0 }
}

/// Where `MSG_PEEK` begins in the socket's queue (`SO_PEEK_OFF`): each peek goes on from the last.
pub(crate) fn set_peek_offset(socket: BorrowedFd<'_>, offset: i32) -> Result<(), Errno> {
    let len = size_of::<i32>() as libc::socklen_t;
    let at = (&raw const offset).cast();
    // SAFETY: the option is an int, which is read during the call, and no pointer is kept.
    let outcome = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, at, len)
    };
    if outcome == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}
