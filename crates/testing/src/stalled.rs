//! A FUSE file system that hangs, permanently or for some time, to detect threads that wait for it.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags,
    Generation, INodeNo, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyPoll, ReplyWrite, Request, Session, TimeOrNow, WriteFlags,
};
use parking_lot::{Mutex, MutexGuard};
use rustix::process::{Pid, Signal, kill_process};

use crate::wait;

/// Environment variable of the daemon process: its mount point.
const MOUNT_AT: &str = "STALLED_MOUNT_AT";

/// Environment variable: if set, the file can be opened as an image, and only its data requests
/// hang.
const AS_IMAGE: &str = "STALLED_AS_IMAGE";

/// Environment variable: path of another file. The file system passes the requests through to that
/// file.
const OVER: &str = "STALLED_OVER";

/// Environment variable: if set, fsync is answered as not implemented.
const NO_SYNCS: &str = "STALLED_NO_SYNCS";

/// Name of the only file. Tests share it as guest memory, or open it as an image.
const NAME: &str = "memory";
const FILE: INodeNo = INodeNo(2);
const SIZE: u64 = 1 << 20;

/// FUSE file system with one file. After the file was opened, requests for the file hang.
/// `as_image` and `over` are exceptions: with `as_image`, only data requests hang; with `over`,
/// only requests that the test holds.
#[derive(Default)]
struct Stalled {
    opened: AtomicBool,
    as_image: bool,
    /// File to which requests are passed through, if any.
    over: Option<File>,
    /// While this file exists, calls of `open` are held.
    hold: Option<PathBuf>,
    no_syncs: bool,
    unanswered: Mutex<Vec<Box<dyn std::any::Any + Send>>>,
}

impl Stalled {
    fn attributes(&self, ino: INodeNo) -> FileAttr {
        let over = self.over.as_ref().filter(|_| ino == FILE).and_then(|over| over.metadata().ok());
        let attributes = attributes(ino);
        FileAttr { size: over.map_or(attributes.size, |over| over.len()), ..attributes }
    }

    /// Answers a request that has no result data.
    fn end_of(&self, reply: ReplyEmpty) {
        if self.over.is_some() { reply.ok() } else { self.hold_reply(reply) }
    }

    fn hold_reply(&self, reply: impl Send + 'static) {
        self.unanswered.lock().push(Box::new(reply));
    }
}

fn attributes(ino: INodeNo) -> FileAttr {
    let directory = ino == INodeNo::ROOT;
    FileAttr {
        ino,
        size: if directory { 0 } else { SIZE },
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if directory { FileType::Directory } else { FileType::RegularFile },
        perm: 0o755,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Stalled {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == NAME {
            true => reply.entry(&Duration::ZERO, &self.attributes(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        if !self.as_image && ino == FILE && self.opened.load(Ordering::SeqCst) {
            return self.hold_reply(reply);
        }
        reply.attr(&Duration::ZERO, &self.attributes(ino));
    }

    /// Sets the length of the file.
    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match (&self.over, size) {
            (Some(over), Some(size)) if over.set_len(size).is_err() => reply.error(Errno::EIO),
            (Some(_), _) => reply.attr(&Duration::ZERO, &self.attributes(ino)),
            (None, _) => reply.error(Errno::ENOSYS),
        }
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.opened.store(true, Ordering::SeqCst);
        // With direct I/O, the page cache does not answer requests in place of the storage.
        let direct = FopenFlags::FOPEN_DIRECT_IO;
        let flags = if self.over.is_some() { direct } else { FopenFlags::empty() };
        match self.hold.clone().filter(|hold| hold.exists()) {
            Some(hold) => {
                std::thread::spawn(move || {
                    while hold.exists() {
                        wait::pause();
                    }
                    reply.opened(FileHandle(0), flags);
                });
            }
            None => reply.opened(FileHandle(0), flags),
        }
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let Some(over) = &self.over else { return self.hold_reply(reply) };
        let mut data = vec![0; size as usize];
        match over.read_at(&mut data, offset) {
            Ok(read) => reply.data(data.get(..read).unwrap_or_default()),
            Err(_) => reply.error(Errno::EIO),
        }
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.over.as_ref().map(|over| over.write_all_at(data, offset)) {
            Some(Ok(())) => reply.written(data.len() as u32),
            _ => reply.error(Errno::EIO),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.end_of(reply);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        if self.no_syncs {
            return reply.error(Errno::ENOSYS);
        }
        self.end_of(reply);
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.end_of(reply);
    }

    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: fuser::PollNotifier,
        _: fuser::PollEvents,
        _: fuser::PollFlags,
        reply: ReplyPoll,
    ) {
        self.hold_reply(reply);
    }
}

/// File beside an image that exists while calls of `open` are held.
fn hold_of(image: &Path) -> PathBuf {
    image.with_extension("hold")
}

/// Runs the daemon and ends the process, if this process was started as the daemon. Otherwise
/// returns.
pub fn run_daemon_if_requested() {
    let Some(path) = std::env::var_os(MOUNT_AT) else { return };
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("stalled".into())];
    let as_image = std::env::var_os(AS_IMAGE).is_some();
    let over = std::env::var_os(OVER);
    let hold = over.as_ref().map(|over| hold_of(Path::new(over)));
    let over = over.map(|over| File::options().read(true).write(true).open(over).unwrap());
    let as_image = as_image || over.is_some();
    let no_syncs = std::env::var_os(NO_SYNCS).is_some();
    let stalled = Stalled { as_image, over, hold, no_syncs, ..Stalled::default() };
    let session = Session::new(stalled, &path, &config);
    let outcome = session.and_then(Session::run);
    std::process::exit(i32::from(outcome.is_err()));
}

/// A mount of the file system. The daemon is a separate process. When it is killed, all threads
/// that wait for it continue. Otherwise these threads could not be killed, and this process could
/// not end.
pub struct Mount {
    daemon: Child,
    directory: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// Permits one mount at a time. Otherwise, the process that is forked to start the second daemon
/// would inherit open files of the first mount, and close them before exec. The close would hang,
/// and meanwhile the forked process would hold all inherited sockets too.
static SERIAL: Mutex<()> = Mutex::new(());

impl Mount {
    /// Mounts the file system. Returns `None` without `/dev/fuse` or without root. `test` is the
    /// full name of a test of the same program that calls [`run_daemon_if_requested`].
    ///
    /// # Panics
    ///
    /// If the mount fails.
    #[must_use]
    pub fn new(test: &str) -> Option<Self> {
        Self::start(test, &[])
    }

    /// Mounts the file system with a file that can be opened as an image, at [`path`](Self::path).
    /// Its reads, writes, syncs and closes hang.
    ///
    /// # Panics
    ///
    /// If the mount fails.
    #[must_use]
    pub fn with_image(test: &str) -> Option<Self> {
        Self::start(test, &[(AS_IMAGE, Path::new("1"))])
    }

    /// Mounts the file system with a file that passes requests through to the file `image`.
    /// Requests hang only between [`stall`](Self::stall) and [`resume`](Self::resume).
    ///
    /// # Panics
    ///
    /// If the mount fails.
    #[must_use]
    pub fn over(test: &str, image: &Path) -> Option<Self> {
        Self::start(test, &[(OVER, image)])
    }

    /// Mounts the file system like [`over`](Self::over), but the daemon does not implement fsync.
    /// The kernel then answers fsync with success.
    ///
    /// # Panics
    ///
    /// If the mount fails.
    #[must_use]
    pub fn without_syncs(test: &str, image: &Path) -> Option<Self> {
        Self::start(test, &[(OVER, image), (NO_SYNCS, Path::new("1"))])
    }

    fn start(test: &str, what: &[(&str, &Path)]) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
            crate::programs::skipped("needs /dev/fuse and root");
            return None;
        }
        let alone = SERIAL.lock();
        let directory = tempfile::tempdir().unwrap();
        let mut daemon = Command::new(std::env::current_exe().unwrap());
        daemon.envs(what.iter().copied());
        let daemon = daemon
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(MOUNT_AT, directory.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let mut mount = Self { daemon, directory, _alone: alone };
        wait::until("the daemon's file", || {
            assert!(mount.daemon.try_wait().unwrap().is_none(), "the daemon has ended");
            mount.path().exists()
        });
        Some(mount)
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join(NAME)
    }

    /// Opens the file. The caller must neither close nor access the descriptor while the daemon
    /// lives: both would hang.
    ///
    /// # Panics
    ///
    /// If the file cannot be opened.
    #[must_use]
    pub fn open(&self) -> OwnedFd {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::open(self.path(), flags, rustix::fs::Mode::empty()).unwrap()
    }

    /// Stops the daemon: from now on requests hang.
    ///
    /// # Panics
    ///
    /// If the daemon has ended, or does not stop.
    pub fn stall(&self) {
        self.signal(Signal::STOP);
        // The daemon may still be writing a reply, so this function waits until it is stopped.
        let stat = format!("/proc/{}/stat", self.daemon.id());
        wait::until("a stopped daemon", || {
            std::fs::read_to_string(&stat).unwrap().contains(") T ")
        });
    }

    /// From now on, calls of `open` hang on a mount [over](Self::over) `image`, and all other
    /// requests are answered. Returns the file by whose removal they continue.
    ///
    /// # Panics
    ///
    /// If the file cannot be created.
    #[must_use]
    pub fn hold_opens(image: &Path) -> PathBuf {
        let hold = hold_of(image);
        std::fs::write(&hold, "").unwrap();
        hold
    }

    /// Resumes the daemon: hung requests are answered.
    ///
    /// # Panics
    ///
    /// If the daemon has ended.
    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.daemon.id().cast_signed()).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Kills the daemon, so that all requests that wait for the daemon end.
    pub fn end(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.end();
        let outcome: io::Result<()> =
            rustix::mount::unmount(self.directory.path(), rustix::mount::UnmountFlags::DETACH)
                .map_err(Into::into);
        if let Err(error) = outcome {
            eprintln!("{} stays mounted: {error}", self.directory.path().display());
        }
    }
}
