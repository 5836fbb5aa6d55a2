//! The disk as a file, which a loop device turns into a block device on any Linux.
//!
//! The file system has one file, its root, and is mounted over a file. The kernel caches nothing of
//! it: every read and write is one of the disk's.
//!
//! ```text
//! shadowbell export nvme://0000:01:00.0/1 --fuse /run/disk &
//! losetup --find --show --direct-io=on /run/disk
//! ```
//!
//! A program that copies within the file by `copy_file_range(2)` has the controller do it, if that
//! has a Copy command: the data do not come here.
//!
//! What the file can not do: change its size (open it without truncating: `dd conv=notrunc`), its
//! owner or its mode.

mod file;

use crate::failures::FailureCount;
use file::DiskFile;
use fuser::{BackgroundSession, Config, MountOption, Session, SessionACL};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use shadowbell_block::BlockDevice;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Threads that take requests from the kernel: so many are under way at once.
const THREADS: usize = 16;

/// Why a disk could not be mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// There is something that is no file.
    #[error("{} is not a file: name an empty file, or one that is not there yet", .0.display())]
    NotAFile(PathBuf),
    /// A file system whose server died is still mounted there.
    #[error("{path} is the mount of a server that died: `umount {path}` first", path = .0.display())]
    Dead(PathBuf),
    /// The file is not to be had.
    #[error("{} can not be used: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// There is no FUSE here, or not for us.
    #[error("{} can not be mounted over: {source}; that takes /dev/fuse, and root or fusermount3",
        path.display())]
    Mount {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The system has no thread.
    #[error("the mount can not be served: {0}")]
    System(io::Error),
}

/// A disk that is mounted over a file.
pub struct Mounted {
    path: PathBuf,
    /// The file was made for the mount.
    created: bool,
    server: Option<JoinHandle<()>>,
    /// Nothing is mounted any more.
    over: Arc<AtomicBool>,
    failures: Arc<FailureCount>,
}

impl Mounted {
    /// Mounts `disk` over the file `path`, which is created if it is not there. `on_end` is called
    /// when nothing is mounted there any more, for whatever reason.
    ///
    /// # Errors
    /// [`MountError`]; nothing is left behind.
    pub fn start(
        disk: BlockDevice,
        path: &Path,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        let (path, created) = prepare(path)?;
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName("shadowbell".into()),
            MountOption::Subtype("shadowbell".into()),
            MountOption::DefaultPermissions,
        ];
        if disk.geometry().read_only {
            config.mount_options.push(MountOption::RO);
        }
        config.acl = SessionACL::Owner;
        config.n_threads = Some(THREADS);
        config.clone_fd = true;
        let failures = Arc::<FailureCount>::default();
        let file = DiskFile::new(disk, Arc::clone(&failures));
        let session = Session::new(file, &path, &config).and_then(Session::spawn);
        let session = session.map_err(|source| {
            forget(&path, created);
            MountError::Mount { path: path.clone(), source }
        })?;
        let mut mounted = Self { path, created, server: None, over: Arc::default(), failures };
        let over = Arc::clone(&mounted.over);
        let server = move || serve(session, &over, on_end);
        let server = std::thread::Builder::new().name("fuse".into()).spawn(server);
        mounted.server = Some(server.map_err(MountError::System)?);
        Ok(mounted)
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many requests failed because the disk did.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.count()
    }

    /// Unmounts, and waits until the file is not used any more: what has it open (a loop device
    /// with a file system on it) may have more to write. How many requests failed because the disk
    /// did.
    #[must_use]
    pub fn stop(self) -> u64 {
        let failures = Arc::clone(&self.failures);
        drop(self);
        failures.count()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if !self.over.load(Ordering::Acquire) {
            match unmount(&self.path, UnmountFlags::empty()) {
                Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
                Err(Errno::BUSY) => {
                    tracing::warn!(
                        "{} is in use, and is waited for; a program that opens it now finds it empty",
                        self.path.display()
                    );
                    let _ = unmount(&self.path, UnmountFlags::DETACH);
                }
                Err(errno) => {
                    // Not root: the program that helped to mount helps to unmount.
                    let helper = std::process::Command::new("fusermount3")
                        .args(["-u", "-z", "--"])
                        .arg(&self.path)
                        .output();
                    if !helper.is_ok_and(|helper| helper.status.success()) {
                        tracing::warn!("{} is not unmounted: {errno}", self.path.display());
                    }
                }
            }
        }
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
        forget(&self.path, self.created);
    }
}

fn serve(session: BackgroundSession, over: &AtomicBool, on_end: impl FnOnce()) {
    match session.join() {
        Ok(()) => tracing::debug!("unmounted"),
        Err(error) => tracing::warn!("the mount came to an end: {error}"),
    }
    over.store(true, Ordering::Release);
    on_end();
}

/// The file to mount over, as an absolute path, and whether it was created for that.
fn prepare(path: &Path) -> Result<(PathBuf, bool), MountError> {
    let failed = |source| MountError::File { path: path.to_owned(), source };
    let created = match std::fs::metadata(path) {
        Ok(about) if about.is_file() => false,
        Ok(_) => return Err(MountError::NotAFile(path.to_owned())),
        Err(error) if error.raw_os_error() == Some(Errno::NOTCONN.raw_os_error()) => {
            return Err(MountError::Dead(path.to_owned()));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            OpenOptions::new().write(true).create_new(true).open(path).map_err(failed)?;
            true
        }
        Err(error) => return Err(failed(error)),
    };
    // It is looked at to be mounted over, so it can be read.
    let usable = File::open(path).and_then(|_| path.canonicalize());
    match usable {
        Ok(path) => Ok((path, created)),
        Err(error) => {
            forget(path, created);
            Err(failed(error))
        }
    }
}

/// Removes a file that was made for the mount and still is what it was.
fn forget(path: &Path, created: bool) {
    if created && std::fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() == 0) {
        let _ = std::fs::remove_file(path);
    }
}
