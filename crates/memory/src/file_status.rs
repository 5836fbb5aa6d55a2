//! Identity and size of an open file.

use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;
use std::os::fd::AsFd;

/// Identity and size of a file, from `statx`. The standard library uses the same system call, so
/// the sandbox (seccomp) has to allow only this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileStatus {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Length in bytes.
    pub len: u64,
    /// Allocated bytes.
    pub allocated: u64,
}

impl FileStatus {
    /// Returns the current status of `fd`, by one system call.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn of(fd: impl AsFd) -> Result<Self, Errno> {
        let found = statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?;
        Ok(Self {
            device: rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor),
            inode: found.stx_ino,
            len: found.stx_size,
            allocated: found.stx_blocks.saturating_mul(512),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn file_status_equals_that_of_the_standard_library() {
        let fd = rustix::fs::memfd_create("status", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = std::fs::File::from(fd);
        file.set_len(12345).unwrap();
        rustix::io::pwrite(&file, b"x", 8192).unwrap();
        let (ours, theirs) = (FileStatus::of(&file).unwrap(), file.metadata().unwrap());
        assert_eq!((ours.device, ours.inode), (theirs.dev(), theirs.ino()));
        assert_eq!((ours.len, ours.allocated), (12345, theirs.blocks() * 512));
    }
}
