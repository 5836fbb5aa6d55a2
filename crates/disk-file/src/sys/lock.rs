//! Advisory lock: it prevents two programs from writing to one image.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Locks all of `file`, for the lifetime of its open file description. Readers share the lock; a
/// writer has it exclusively. QEMU locks its images by the same kind of lock (open file description
/// locks, on a few bytes), so each of the programs detects the other.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another process holds the lock. If the file system has no
/// locks, this is no error.
pub(crate) fn lock_image(file: &File, exclusive: bool) -> io::Result<()> {
    match set(file, if exclusive { libc::F_WRLCK } else { libc::F_RDLCK }) {
        Err(e) => match e.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => Err(io::ErrorKind::WouldBlock.into()),
            Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOLCK | libc::EINVAL) => Ok(()),
            _ => Err(e),
        },
        Ok(()) => Ok(()),
    }
}

/// True if this open file holds the exclusive lock, which the file system supports.
pub(crate) fn is_locked_exclusively(file: &File) -> bool {
    // The lock of the open file is set again, without an effect if it is held. It cannot be set
    // by a read-only open file, or where the file system has no locks.
    set(file, libc::F_WRLCK).is_ok()
}

/// Releases the lock before the file is closed. Closing does not release it at once, because a
/// closed io_uring releases its files later.
pub(crate) fn unlock_image(file: &File) {
    // A failure is ignored, because closing the file releases the lock anyway.
    let _ = set(file, libc::F_UNLCK);
}

fn set(file: &File, kind: libc::c_int) -> io::Result<()> {
    loop {
        // SAFETY: `flock` is plain data for which zeroes are valid values; start and length 0 mean
        // the whole file. The structure outlives the call, which only reads it.
        let outcome = unsafe {
            let mut lock: libc::flock = std::mem::zeroed();
            lock.l_type = kind as libc::c_short;
            lock.l_whence = libc::SEEK_SET as libc::c_short;
            libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock)
        };
        if outcome == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
