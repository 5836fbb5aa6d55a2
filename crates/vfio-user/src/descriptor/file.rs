//! Letting go of a file that nobody else may have.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// What is closed in no time, in bytes.
const SMALL: u64 = 16 << 20;
/// The unit of `st_blocks`, in bytes.
const BLOCK: u64 = 512;

/// A file that a peer sent. If it is not wanted, it is closed as by [`close_file`].
#[derive(Debug)]
pub struct PeerFile(Option<OwnedFd>);

impl PeerFile {
    pub(super) fn new(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }

    /// It is wanted.
    #[must_use]
    pub fn keep(mut self) -> OwnedFd {
        self.0.take().expect("a file is there until it is dropped")
    }
}

impl Drop for PeerFile {
    fn drop(&mut self) {
        self.0.take().map(close_file);
    }
}

/// Closes a file that a peer sent, and that answers. Whether a thread of its own does so.
///
/// Whoever closes a file last frees what is in it, which takes a tenth of a second and more for
/// each GiB; and a peer can see to it that that is us. Nobody is to wait for that.
pub fn close_file(fd: OwnedFd) -> bool {
    let is_large = holds(fd.as_fd()) > SMALL;
    if is_large {
        // Without a thread it happens here.
        let thread = std::thread::Builder::new().name("close-file".into());
        let _ = thread.spawn(move || drop(fd));
    }
    is_large
}

/// How many bytes of memory or disk the file has.
fn holds(fd: BorrowedFd<'_>) -> u64 {
    let blocks = rustix::fs::fstat(fd).map_or(0, |stat| stat.st_blocks);
    u64::try_from(blocks).unwrap_or(0).saturating_mul(BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

    #[test]
    fn nobody_waits_for_the_end_of_a_large_file() {
        let file = |len: u64, filled: u64| {
            let fd = memfd_create("letting-go", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&fd, len).unwrap();
            if filled != 0 {
                fallocate(&fd, FallocateFlags::empty(), 0, filled).unwrap();
            }
            fd
        };
        assert!(!close_file(file(1 << 40, 0)), "there is nothing in it");
        assert!(!close_file(file(1 << 40, SMALL)));
        assert!(close_file(file(SMALL + 4096, SMALL + 4096)));
    }
}
