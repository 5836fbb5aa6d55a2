//! Advisory locks of images: they prevent two programs from writing to one image.
//!
//! The locks of images are those of QEMU, so each program detects the other: open file description
//! locks, one byte per permission. A program locks byte 100+n for permission n that it uses, and
//! byte 200+n for permission n that it does not share. Then it tests the opposite bytes. Locking
//! fails if another program uses a permission that this program does not share, or does not share a
//! permission that this program uses. All these locks are read locks, so that several programs can
//! hold them and read-only files can have them.
//!
//! A writer also has a write lock on one byte that QEMU does not use. This lock is the fence: the
//! kernel releases it only after the last request of a dead writer has ended.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

/// Offset of the first byte that marks a used permission: byte `USED + n` for permission n.
const USED: i64 = 100;
/// Offset of the first byte that marks an unshared permission: byte `UNSHARED + n` for permission
/// n.
const UNSHARED: i64 = 200;
/// Byte of the fence. A writer holds a write lock on it.
const FENCE: Range<i64> = 300..301;

/// Permission to read consistent data.
const CONSISTENT_READ: i64 = 0;
/// Permission to write.
const WRITE: i64 = 1;
/// Permission to change the size.
const RESIZE: i64 = 3;

/// Permissions that this program never shares. So no other program changes an open image.
const CHANGES: [i64; 2] = [WRITE, RESIZE];

/// Locks the image `file` until its open file description is closed. Several readers can lock an
/// image at the same time. A `writer` excludes all programs except readers that accept changes.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] if another program has a lock that excludes the requested lock. If
/// the file system has no locks, this is no error.
pub(crate) fn lock_image(file: &File, writer: bool) -> io::Result<()> {
    match lock(file, writer) {
        Err(e) => match e.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => {
                unlock_image(file);
                Err(io::ErrorKind::WouldBlock.into())
            }
            Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOLCK | libc::EINVAL) => Ok(()),
            _ => Err(e),
        },
        Ok(()) => Ok(()),
    }
}

fn lock(file: &File, writer: bool) -> io::Result<()> {
    // The fence is locked first, so that one writer succeeds if two writers lock at the same time.
    if writer {
        call(file, libc::F_OFD_SETLK, libc::F_WRLCK, FENCE)?;
    }
    let uses = if writer { &[CONSISTENT_READ, WRITE, RESIZE][..] } else { &[CONSISTENT_READ] };
    for byte in uses.iter().map(|n| USED + n).chain(CHANGES.map(|n| UNSHARED + n)) {
        call(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte..byte + 1)?;
    }
    for byte in uses.iter().map(|n| UNSHARED + n).chain(CHANGES.map(|n| USED + n)) {
        // The test is for a write lock, because only a write lock conflicts with the read locks of
        // others.
        if call(file, libc::F_OFD_GETLK, libc::F_WRLCK, byte..byte + 1)? != libc::F_UNLCK {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
    }
    Ok(())
}

/// True if a `writer` has [locked](lock_image) this open file and the lock is effective: the file
/// system supports locks.
pub(crate) fn is_locked_exclusively(file: &File, writer: bool) -> bool {
    // Sets the lock again. This has no effect if the open file holds the lock, and fails if the
    // file system has no locks. It is not done for a reader, because a reader whose file was opened
    // for writing would take the fence.
    writer && call(file, libc::F_OFD_SETLK, libc::F_WRLCK, FENCE).is_ok()
}

/// Releases the locks of an open file at once. Closing the file would release them only later,
/// because the kernel keeps a file open until a closed io_uring has released it.
pub(crate) fn unlock_image(file: &File) {
    // A failure is ignored, because closing the file releases the locks anyway.
    let _ = call(file, libc::F_OFD_SETLK, libc::F_UNLCK, 0..0);
}

/// Sets or tests a lock of the range `bytes`; the range `0..0` is the whole file. Returns the type
/// of the conflicting lock that a test has found, or `F_UNLCK`.
fn call(
    file: &File,
    command: libc::c_int,
    kind: libc::c_int,
    bytes: Range<i64>,
) -> io::Result<libc::c_int> {
    loop {
        // SAFETY: `flock` is plain data for which zeroes are valid values. The structure outlives
        // the system call, and the call accesses no other memory.
        let (outcome, found) = unsafe {
            let mut lock: libc::flock = std::mem::zeroed();
            lock.l_type = kind as libc::c_short;
            lock.l_whence = libc::SEEK_SET as libc::c_short;
            lock.l_start = bytes.start;
            lock.l_len = bytes.end - bytes.start;
            let outcome = libc::fcntl(file.as_raw_fd(), command, &raw mut lock);
            (outcome, libc::c_int::from(lock.l_type))
        };
        if outcome == 0 {
            return Ok(found);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reader_of_a_writable_file_does_not_take_the_fence() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::options().read(true).write(true).open(file.path()).unwrap();
        let (reader, writer) = (open(), open());
        lock_image(&reader, false).unwrap();
        assert!(!is_locked_exclusively(&reader, false));
        call(&writer, libc::F_OFD_SETLK, libc::F_WRLCK, FENCE).unwrap();
        unlock_image(&reader);
        lock_image(&writer, true).unwrap();
        assert!(is_locked_exclusively(&writer, true));
    }
}
