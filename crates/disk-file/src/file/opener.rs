//! Opening of images, by this process or by a process with more permissions.

use super::namespace::{NamespaceFacts, identify_namespace};
use rustix::fs::{CWD, Mode, OFlags};
use std::cell::RefCell;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Access mode of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read-only.
    Read,
    /// Read and write.
    Write,
    /// Read and write with `O_EXCL`. Fails for a block device that is mounted or part of another
    /// device.
    WriteExclusive,
}

/// Connection to another process that opens images, for a process that has no permission to open
/// them.
pub trait Opener: Send + Sync {
    /// Returns an `O_PATH` descriptor of the file at `path`, which gives no access to its content.
    /// The other process holds the file until [`end_use`](Self::end_use), once for each call.
    ///
    /// # Errors
    /// The system's error; [`io::ErrorKind::PermissionDenied`] with a reason if the other process
    /// refuses.
    fn name(&self, path: &Path) -> io::Result<OwnedFd>;

    /// Opens the file of an `O_PATH` descriptor. The result must be a new open file description,
    /// because the image lock belongs to it and must not be shared.
    ///
    /// # Errors
    /// Like [`name`](Self::name).
    fn open(&self, named: BorrowedFd<'_>, access: Access) -> io::Result<File>;

    /// Reads the [Identify data](identify_namespace) of a namespace, for a process that may not
    /// send admin commands. `named` names the character device of the namespace.
    /// # Errors
    /// Like [`identify_namespace`].
    fn identify(&self, named: BorrowedFd<'_>, written: bool) -> io::Result<NamespaceFacts>;

    /// Reports that this process does not need the file any more that [`name`](Self::name) has
    /// returned. Must not block.
    fn end_use(&self, named: BorrowedFd<'_>);
}

static OPENER: OnceLock<Box<dyn Opener>> = OnceLock::new();

/// Makes `opener` open all further images of this process. Only the first call has an effect.
pub fn open_images_by(opener: Box<dyn Opener>) {
    let _ = OPENER.set(opener);
}

/// Requests an `O_PATH` descriptor of the file at `path` from the [`Opener`]. `None` if this
/// process opens images itself.
pub(super) fn name(path: &Path) -> Option<io::Result<OwnedFd>> {
    OPENER.get().map(|opener| opener.name(path))
}

thread_local! {
    /// Images whose use has ended since this thread's [`OpenAttempt`] began.
    static ENDED: RefCell<Option<Vec<OwnedFd>>> = const { RefCell::new(None) };
}

/// Attempt of this thread to open a disk. Ends of uses are reported to the [`Opener`] only after
/// it: an image whose format is detected is then opened again, as an image of that format.
#[derive(Debug)]
pub struct OpenAttempt(());

impl OpenAttempt {
    /// Begins an attempt, which ends when the result is dropped.
    #[must_use]
    pub fn begin() -> Self {
        ENDED.with_borrow_mut(|ended| {
            ended.get_or_insert_default();
        });
        Self(())
    }
}

impl Drop for OpenAttempt {
    fn drop(&mut self) {
        ENDED.take().into_iter().flatten().for_each(end_use);
    }
}

/// Reports the end of an image's use to the [`Opener`]. `named`: result of [`name`].
pub(super) fn end_use(named: OwnedFd) {
    let mut named = Some(named);
    // The variable does not exist any more if a thread drops a disk at its end.
    let _ = ENDED.try_with(|ended| {
        if let Some(ended) = &mut *ended.borrow_mut() {
            ended.extend(named.take());
        }
    });
    if let Some((opener, named)) = OPENER.get().zip(named) {
        opener.end_use(named.as_fd());
    }
}

/// Use of an image that the [`Opener`] has named and opened. It ends when the value is dropped.
#[derive(Debug)]
pub(super) struct ImageUse(pub(super) Arc<File>);

impl Drop for ImageUse {
    fn drop(&mut self) {
        // If the descriptor limit is reached, the image stays held until the end of this process.
        let _ = name_of(&self.0).map(end_use);
    }
}

/// Returns an `O_PATH` descriptor of `file`. The lock of `file` does not depend on it, because it
/// has its own open file description.
pub(super) fn name_of(file: &File) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?)
}

/// Reads the Identify data of a namespace. `named` names the character device of the namespace.
pub(super) fn identify(named: BorrowedFd<'_>, written: bool) -> io::Result<NamespaceFacts> {
    match OPENER.get() {
        Some(opener) => opener.identify(named, written),
        None => identify_namespace(&At::Named(named).path(), written),
    }
}

/// Location of an image.
#[derive(Clone, Copy, Debug)]
pub(super) enum At<'a> {
    Path(&'a Path),
    /// The file that an `O_PATH` descriptor names.
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

/// Opens the image file or device at `path`.
///
/// # Errors
/// The system's error.
pub fn open(path: &Path, access: Access) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(access != Access::Read);
    if access == Access::WriteExclusive {
        options.custom_flags(libc::O_EXCL);
    }
    options.open(path)
}
