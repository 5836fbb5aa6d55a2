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
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`Mounted`] | the mount: it is made, and the two ends agree, by the library `fuser` |
//! | `device` | the requests after that: taken, carried out and answered by a thread, or some |
//! | `file` | what comes of a request |
//! | `wire`, `sys` | the kernel's layout of requests and answers; how they are read and written |

mod device;
mod file;
#[allow(unsafe_code, reason = "memory that a device may change is not borrowed")]
mod sys;
mod wire;

use crate::failures::FailureCount;
use crate::lent;
use crate::queue_server::QueueThreads;
use device::{Crew, Device, Shared, carry_out};
use file::DiskFile;
use fuser::{Config, Filesystem, InitFlags, KernelConfig, MountOption, Session, SessionACL};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use shadowbell_block::BlockDevice;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use wire::MAX_REQUEST;

/// The most threads that serve a mount; and no more than half of the processors, because a program
/// that asks for so much needs the others.
const MOST_THREADS: usize = 4;
/// Asynchronous requests that the kernel may have under way.
const BACKGROUND: u16 = 256;

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

/// How a file is served.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Threads that take requests, of which all but the first only do so when that does not get to
    /// the end of them. Unless somebody says so, half as many as there are processors, and four at
    /// most; and never more than the disk has queues.
    pub threads: Option<usize>,
    /// Threads that serve the disk's queues, if its controller is in this process: they serve the
    /// file too while it is used. Otherwise each request takes two threads that wake each other.
    pub lender: Option<Arc<dyn QueueThreads>>,
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
        Self::start_with(disk, path, &Options::default(), on_end)
    }

    /// As [`start`](Self::start), served as the options say.
    ///
    /// # Errors
    /// [`MountError`]; nothing is left behind.
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
                // Nothing is mounted any more, and nobody was served.
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

/// What the two ends agree on. Everything after that is [`device`]'s.
struct Agreement;

impl Filesystem for Agreement {
    fn init(&mut self, _: &fuser::Request, config: &mut KernelConfig) -> io::Result<()> {
        // What a kernel does not have, it does without.
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

/// What a thread does.
type Run = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// The threads of a mount: the first of them takes requests, the others help it.
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
    let count = count.clamp(1, disk.queues().max(1));
    let mut crew = Crew::default();
    let mut parts = Vec::new();
    for number in 0..count {
        let disk = disk.on_queue(number);
        let io = Device::io_thread(&disk)?;
        let helper = if number == 0 { None } else { Some(crew.add(io.waker()?)) };
        parts.push((helper, disk, io));
    }
    let shared = Arc::new(Shared { device, file: DiskFile::new(*disk.geometry()), failures, crew });
    let mut runs = Vec::new();
    for (helper, disk, io) in parts {
        let device = Device::new(Arc::clone(&shared), helper, disk, io)?;
        let lender = options.lender.clone();
        let serving = Box::new((device, carry_out));
        runs.push(Box::new(move || lent::serve(serving, lender.as_ref())) as Run);
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
            Err(error) => tracing::debug!("the mount has a thread less: {error}"),
        }
    }
    let outcome = first();
    shared.crew.end();
    for thread in running {
        let _ = thread.join();
    }
    match outcome {
        Ok(()) => tracing::debug!("unmounted"),
        Err(error) => tracing::warn!("the mount came to an end: {error}"),
    }
    // Whoever still waits for an answer gets an error.
    drop((shared, session));
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
