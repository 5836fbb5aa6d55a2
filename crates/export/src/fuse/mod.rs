//! FUSE export: the disk as a file, from which a loop device can make a block device.
//!
//! The file system consists of one file, its root, and is mounted over an existing file. The kernel
//! does not cache the file: every read or write of the file is a read or write of the disk.
//!
//! ```text
//! shadowbell export nvme://0000:01:00.0/1 --fuse /run/disk &
//! losetup --find --show --direct-io=on /run/disk
//! ```
//!
//! If a program copies within the file by `copy_file_range(2)`, the data does not pass through the
//! kernel and the program.
//!
//! Size, owner and mode of the file cannot be changed. So programs have to open the file without
//! truncation (`dd conv=notrunc`).
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`Mounted`] | the mount; the library `fuser` mounts and negotiates the session |
//! | `device` | requests after the negotiation: the threads that execute them |
//! | `file` | translation of a request to a disk operation |
//! | `wire`, `sys` | layout of requests and answers; system calls that read and write them |

mod device;
mod file;
#[allow(unsafe_code, reason = "memory that a device may change is not borrowed")]
mod sys;
mod wire;

use crate::failures::FailureCount;
use device::{Crew, Device, Shared, carry_out};
use file::DiskFile;
use fuser::{Config, Filesystem, InitFlags, KernelConfig, MountOption, Session, SessionACL};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use shadowbell_block::BlockDevice;
use shadowbell_memory::EventFd;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use wire::MAX_REQUEST;

/// Largest default number of threads of a mount. At most half of the processors are used, because a
/// program with a high load needs the others.
const MOST_THREADS: usize = 4;
/// Largest number of asynchronous requests that the kernel has in flight.
const BACKGROUND: u16 = 256;

/// Reason for which a disk could not be mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The path exists and is no regular file.
    #[error(
        "{} is not a regular file: name an empty file, or a path that does not exist",
        .0.display()
    )]
    NotAFile(PathBuf),
    /// The path still is the mount of a file system whose server has died.
    #[error("{path} is the mount of a server that died: `umount {path}` first", path = .0.display())]
    Dead(PathBuf),
    /// The file cannot be created or opened.
    #[error("{} cannot be used: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The path exists and is not a regular file.
        source: io::Error,
    },
    /// The path is still the mount point of a file system whose server has died.
    #[error("{} cannot be mounted over: {source}; this needs /dev/fuse, and root or fusermount3",
        path.display())]
    Mount {
        /// Path of the file.
        path: PathBuf,
        /// Error of the mount.
        source: io::Error,
    },
    /// A thread or descriptor cannot be created.
    #[error("the mount cannot be served: {0}")]
    System(io::Error),
}

/// Options of a mount.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Number of threads that serve requests. Threads other than the first are used only while the
    /// first has too many requests. The default is half the number of processors, but at most four.
    /// There are never more threads than the disk has queues.
    pub threads: Option<usize>,
}

/// Disk that is mounted over a file. Dropping the value unmounts it.
pub struct Mounted {
    path: PathBuf,
    /// True if the file was created for the mount.
    created: bool,
    server: Option<JoinHandle<()>>,
    /// True after the file system was unmounted.
    over: Arc<AtomicBool>,
    failures: Arc<FailureCount>,
}

impl Mounted {
    /// Mounts `disk` over the file `path`, which is created if it does not exist. `on_end` is
    /// called when the file system is unmounted for any reason.
    ///
    /// # Errors
    /// [`MountError`]. The mount and a created file are removed before the return.
    pub fn start(
        disk: BlockDevice,
        path: &Path,
        on_end: impl FnOnce() + Send + 'static,
    ) -> Result<Self, MountError> {
        Self::start_with(disk, path, &Options::default(), on_end)
    }

    /// Mounts like [`start`](Self::start), with `options`.
    ///
    /// # Errors
    /// [`MountError`]; the mount and a created file are removed then.
    pub fn start_with(
        disk: BlockDevice,
        path: &Path,
        options: &Options,
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
        let session = Session::new(Agreement, &path, &config).map_err(|source| {
            forget(&path, created);
            MountError::Mount { path: path.clone(), source }
        })?;
        let failures = Arc::<FailureCount>::default();
        let mut mounted = Self { path, created, server: None, over: Arc::default(), failures };
        let threads = threads(&disk, &session, Arc::clone(&mounted.failures), options);
        let threads = match threads {
            Ok(threads) => threads,
            Err(error) => {
                // The drop of the session unmounts the file system. No request has been served yet.
                drop(session);
                mounted.over.store(true, Ordering::Release);
                return Err(MountError::System(error));
            }
        };
        let over = Arc::clone(&mounted.over);
        let server = move || serve(session, threads, &over, on_end);
        let server = std::thread::Builder::new().name("fuse".into()).spawn(server);
        mounted.server = Some(server.map_err(MountError::System)?);
        Ok(mounted)
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Number of requests that failed because of the disk.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.count()
    }

    /// Unmounts the file system, and waits until no program uses the file any more. A user of the
    /// open file, such as a loop device with a file system on it, may still have data to write.
    /// Returns the number of requests that failed because of the disk.
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
                        "{} is in use, waiting for its users; a program that opens it now \
                         finds an empty file",
                        self.path.display()
                    );
                    let _ = unmount(&self.path, UnmountFlags::DETACH);
                }
                Err(errno) => {
                    // Without the privilege to unmount, the process needs the program fusermount3.
                    let helper = std::process::Command::new("fusermount3")
                        .args(["-u", "-z", "--"])
                        .arg(&self.path)
                        .output();
                    if !helper.is_ok_and(|helper| helper.status.success()) {
                        tracing::warn!("cannot unmount {}: {errno}", self.path.display());
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

/// Negotiation of the session. All later requests are handled by [`device`].
struct Agreement;

impl Filesystem for Agreement {
    fn init(&mut self, _: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        // A capability that the kernel does not have is ignored.
        for wanted in [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_BIG_WRITES,
            InitFlags::FUSE_MAX_PAGES,
            InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        ] {
            let _ = config.add_capabilities(wanted);
        }
        let _ = config.set_max_write(MAX_REQUEST);
        let _ = config.set_max_background(BACKGROUND);
        Ok(())
    }
}

/// Main function of a thread.
type Run = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// Threads of a mount: the first thread and its helpers.
struct Threads {
    shared: Arc<Shared>,
    first: Run,
    helpers: Vec<Run>,
}

fn threads(
    disk: &BlockDevice,
    session: &Session<Agreement>,
    failures: Arc<FailureCount>,
    options: &Options,
) -> io::Result<Threads> {
    let device = rustix::io::fcntl_dupfd_cloexec(session.as_fd(), 0)?;
    rustix::io::ioctl_fionbio(&device, true)?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let count = options.threads.unwrap_or((processors / 2).min(MOST_THREADS));
    let count = count.clamp(1, disk.queues());
    let mut crew = Crew::default();
    let mut parts = Vec::new();
    for number in 0..count {
        let event = EventFd::new()?;
        let helper = if number == 0 { None } else { Some(crew.add(event.try_clone()?)) };
        parts.push((helper, event));
    }
    // Opens a queue once, so that a disk without a free queue is detected before the kernel sends a
    // request.
    drop(disk.queue()?);
    let shared = Arc::new(Shared { device, file: DiskFile::new(*disk.geometry()), failures, crew });
    let mut runs = Vec::new();
    for (helper, event) in parts {
        let (shared, disk) = (Arc::clone(&shared), disk.clone());
        runs.push(
            Box::new(move || Device::new(shared, helper, &disk, event)?.run(&carry_out)) as Run
        );
    }
    let first = runs.remove(0);
    Ok(Threads { shared, first, helpers: runs })
}

fn serve(session: Session<Agreement>, threads: Threads, over: &AtomicBool, on_end: impl FnOnce()) {
    let Threads { shared, first, helpers } = threads;
    let mut running = Vec::new();
    for helper in helpers {
        let thread = std::thread::Builder::new().name("fuse-helper".into());
        match thread.spawn(helper) {
            Ok(thread) => running.push(thread),
            Err(error) => tracing::debug!("the mount runs with one thread less: {error}"),
        }
    }
    let outcome = first();
    shared.crew.end();
    for thread in running {
        let _ = thread.join();
    }
    match outcome {
        Ok(()) => tracing::debug!("unmounted"),
        Err(error) => tracing::warn!("the mount has ended: {error}"),
    }
    // When the device is dropped, the kernel fails the requests that were not answered.
    drop((shared, session));
    over.store(true, Ordering::Release);
    on_end();
}

/// Returns the absolute path of the file to mount over, and true if this call created the file.
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
    // The mount needs read access to the file.
    let usable = File::open(path).and_then(|_| path.canonicalize());
    match usable {
        Ok(path) => Ok((path, created)),
        Err(error) => {
            forget(path, created);
            Err(failed(error))
        }
    }
}

/// Removes the file if it was created for the mount and is still empty.
fn forget(path: &Path, created: bool) {
    if created && std::fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() == 0) {
        let _ = std::fs::remove_file(path);
    }
}
