//! Who opens images: this process, or one that may open more than it.

use super::namespace::{NamespaceFacts, identify_namespace};
use rustix::fs::{CWD, Mode, OFlags};
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// What an image is to be opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// For reading.
    Read,
    /// For writing, too.
    Write,
    /// The same, of a block device that nobody else uses: neither is a file system on it mounted,
    /// nor is it part of another device.
    WriteAlone,
}

/// Another process, which opens images for this one.
pub trait Opener: Send + Sync {
    /// A descriptor that only names what is at `path` (`O_PATH`).
    ///
    /// # Errors
    /// The system's; [`io::ErrorKind::PermissionDenied`] with a reason, if it will not.
    fn name(&self, path: &Path) -> io::Result<OwnedFd>;

    /// Opens what a descriptor names, anew: the lock on an image is that of an open file, which
    /// nobody else may have.
    ///
    /// # Errors
    /// As [`name`](Self::name).
    fn open(&self, named: BorrowedFd<'_>, access: Access) -> io::Result<File>;

    /// [What a namespace says](identify_namespace) whose character device a descriptor names: this
    /// process may not ask devices.
    ///
    /// # Errors
    /// As there.
    fn identify(&self, named: BorrowedFd<'_>, written: bool) -> io::Result<NamespaceFacts>;
}

static OPENER: OnceLock<Box<dyn Opener>> = OnceLock::new();

/// From now on this one opens the images of this process. The first one counts.
pub fn open_images_by(opener: Box<dyn Opener>) {
    let _ = OPENER.set(opener);
}

/// A descriptor that names what is at `path`; `None` if this process opens it by itself.
pub(super) fn name(path: &Path) -> Option<io::Result<OwnedFd>> {
    OPENER.get().map(|opener| opener.name(path))
}

/// A descriptor that only names what `file` is, and does not keep it open (`O_PATH`).
pub(super) fn name_of(file: &File) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// What the namespace says whose character device a descriptor names.
pub(super) fn identify(named: BorrowedFd<'_>, written: bool) -> io::Result<NamespaceFacts> {
    match OPENER.get() {
        Some(opener) => opener.identify(named, written),
        None => identify_namespace(&At::Named(named).path(), written),
    }
}

/// Where an image is.
#[derive(Clone, Copy, Debug)]
pub(super) enum At<'a> {
    Path(&'a Path),
    /// What a descriptor names.
    Named(BorrowedFd<'a>),
}

impl At<'_> {
    pub(super) fn metadata(self) -> io::Result<Metadata> {
        std::fs::metadata(self.path())
    }

    pub(super) fn open(self, access: Access) -> io::Result<File> {
        match (self, OPENER.get()) {
            (Self::Named(named), Some(opener)) => opener.open(named, access),
            _ => open(&self.path(), access),
        }
    }

    fn path(self) -> PathBuf {
        match self {
            Self::Path(path) => path.to_owned(),
            Self::Named(named) => format!("/proc/self/fd/{}", named.as_raw_fd()).into(),
        }
    }
}

/// Opens the file or the device at `path` as an image is opened.
///
/// # Errors
/// The system's.
pub fn open(path: &Path, access: Access) -> io::Result<File> {
    let mut how = OpenOptions::new();
    how.read(true).write(access != Access::Read);
    if access == Access::WriteAlone {
        how.custom_flags(libc::O_EXCL);
    }
    how.open(path)
}
