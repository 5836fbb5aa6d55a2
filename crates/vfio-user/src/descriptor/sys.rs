//! The one system call here that nobody has wrapped.

use std::os::fd::{AsRawFd, BorrowedFd};

/// Whether `fd` is a regular file, a directory or a symbolic link, and not a device, a pipe, a
/// socket or anything else that has no size. The kernel tells from its own inode (`FIOQSIZE`) and
/// asks no file system.
pub(super) fn has_size(fd: BorrowedFd<'_>) -> bool {
    let mut size: libc::loff_t = 0;
    // SAFETY: FIOQSIZE writes one `loff_t`, for which there is room, and keeps no pointer.
    unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIOQSIZE, &raw mut size) == 0 }
}
