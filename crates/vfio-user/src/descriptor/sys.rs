//! System calls without a safe wrapper in `rustix`.

use std::os::fd::{AsRawFd, BorrowedFd};

use crate::Errno;

/// True if `fd` is a regular file, a directory or a symbolic link. False for devices, pipes,
/// sockets and other objects without a size. For `FIOQSIZE`, the kernel reads its own inode and
/// does not call the file system.
pub(super) fn has_size(fd: BorrowedFd<'_>) -> bool {
    let mut size: libc::loff_t = 0;
    // SAFETY: FIOQSIZE writes one `loff_t` into `size`, and the kernel does not keep the pointer.
    unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIOQSIZE, &raw mut size) == 0 }
}

/// Sets the position of the next `MSG_PEEK` in the receive queue (`SO_PEEK_OFF`). Each peek
/// advances the position.
pub(crate) fn set_peek_offset(socket: BorrowedFd<'_>, offset: i32) -> Result<(), Errno> {
    let len = size_of::<i32>() as libc::socklen_t;
    let at = (&raw const offset).cast();
    // SAFETY: the option is an int, which the kernel reads during the call, and it does not keep
    // the pointer.
    let outcome = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEEK_OFF, at, len)
    };
    if outcome == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}
