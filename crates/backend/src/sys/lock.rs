//! The advisory lock that keeps two programs from writing one image.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Locks all of `file` for as long as its open file description lives: shared among readers,
/// alone for a writer (`exclusive`). These are the locks that QEMU puts on its images too (open
/// file description locks on a few bytes), so that the two know of each other.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another process has it. A file system that has no locks is no
/// error.
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

/// Gives the lock up, though the file may stay open for a while: a ring that is closed lets go of
/// its files in its own time.
pub(crate) fn unlock_image(file: &File) {
    // There is nothing to be done about a failure, and closing the file ends the lock anyway.
    let _ = set(file, libc::F_UNLCK);
}

fn set(file: &File, kind: libc::c_int) -> io::Result<()> {
    loop {
        // SAFETY: `flock` is plain data for which zeroes are valid values (start and length 0
        // mean the whole file), and it outlives the call, which only reads it.
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
