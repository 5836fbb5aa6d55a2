//! A file system of a client's own (FUSE) that does not answer: to see who waits for it.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyPoll, Request, Session,
};
use parking_lot::{Mutex, MutexGuard};

/// Where the daemon is to mount; set in the process that is it.
const MOUNT_AT: &str = "STALLED_MOUNT_AT";

/// Set too where the file can be opened as an image: only its data are not answered for.
const AS_IMAGE: &str = "STALLED_AS_IMAGE";

/// The one file, which seems to have some memory in it.
const NAME: &str = "memory";
const FILE: INodeNo = INodeNo(2);
const SIZE: u64 = 1 << 20;

/// The file system. Once its file has been opened, whoever wants something of it waits.
#[derive(Default)]
struct Stalled {
    opened: AtomicBool,
    as_image: bool,
    unanswered: Mutex<Vec<Box<dyn std::any::Any + Send>>>,
}

impl Stalled {
    fn keep(&self, reply: impl Send + 'static) {
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
            true => reply.entry(&Duration::ZERO, &attributes(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        if !self.as_image && ino == FILE && self.opened.load(Ordering::SeqCst) {
            return self.keep(reply);
        }
        reply.attr(&Duration::ZERO, &attributes(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.opened.store(true, Ordering::SeqCst);
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.keep(reply);
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.keep(reply);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.keep(reply);
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
        self.keep(reply);
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
        self.keep(reply);
    }
}

/// The daemon, if this process was started to be it; then it ends here.
pub fn be_the_daemon() {
    let Some(path) = std::env::var_os(MOUNT_AT) else { return };
    let mut config = Config::default();
    config.mount_options = vec![MountOption::FSName("stalled".into())];
    let as_image = std::env::var_os(AS_IMAGE).is_some();
    let session = Session::new(Stalled { as_image, ..Stalled::default() }, &path, &config);
    let outcome = session.and_then(Session::run);
    std::process::exit(i32::from(outcome.is_err()));
}

/// A mount of it. Its daemon is a process of its own: what waits for it goes on when that is
/// killed, and without that not even this process could end.
pub struct Mount {
    daemon: Child,
    directory: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

/// One mount at a time: a process that is started while a file of one is open has that, too, and
/// closes it before it becomes the next daemon. Until then it also has everybody's sockets.
static ALONE: Mutex<()> = Mutex::new(());

impl Mount {
    /// Mounts it; nothing where there is no `/dev/fuse`, or this is not root. `test` is the full
    /// name of a test of the same program that calls [`be_the_daemon`].
    ///
    /// # Panics
    /// If nothing is mounted.
    #[must_use]
    pub fn new(test: &str) -> Option<Self> {
        Self::start(test, false)
    }

    /// One whose file can be opened as an image, at [`path`](Self::path): whoever reads or writes
    /// it, syncs or closes it, waits.
    ///
    /// # Panics
    /// If nothing is mounted.
    #[must_use]
    pub fn with_image(test: &str) -> Option<Self> {
        Self::start(test, true)
    }

    fn start(test: &str, as_image: bool) -> Option<Self> {
        if !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
            eprintln!("skipped: it takes /dev/fuse, and root");
            return None;
        }
        let alone = ALONE.lock();
        let directory = tempfile::tempdir().unwrap();
        let mut daemon = Command::new(std::env::current_exe().unwrap());
        if as_image {
            daemon.env(AS_IMAGE, "1");
        }
        let daemon = daemon
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(MOUNT_AT, directory.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let mut mount = Self { daemon, directory, _alone: alone };
        let until = Instant::now() + Duration::from_secs(20);
        while !mount.path().exists() {
            assert!(mount.daemon.try_wait().unwrap().is_none(), "the daemon has ended");
            assert!(Instant::now() < until, "the daemon mounts nothing");
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(mount)
    }

    /// Where the file is.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.directory.path().join(NAME)
    }

    /// The file, open. It must not be closed, nor asked for anything, while the daemon lives.
    ///
    /// # Panics
    /// If it can not be opened.
    #[must_use]
    pub fn open(&self) -> OwnedFd {
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
        rustix::fs::open(self.path(), flags, rustix::fs::Mode::empty()).unwrap()
    }

    /// Ends the daemon: all that wait for it go on.
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
