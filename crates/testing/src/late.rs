//! A block device (a loop device over FUSE) that delays one write, so that it arrives after later
//! writes.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyWrite,
    Request, Session, WriteFlags,
};
use parking_lot::Mutex;

use crate::wait;

/// Environment variable for the daemon process: path of the mount point. The directory with the
/// test's instructions for the daemon is beside the mount point.
const MOUNT_AT: &str = "LATE_MOUNT_AT";
const NAME: &str = "disk";
const FILE: INodeNo = INodeNo(2);
const SIZE: usize = 16 << 20;

/// FUSE file system that can delay a write.
struct Late {
    bytes: Arc<Mutex<Vec<u8>>>,
    orders: PathBuf,
}

fn attributes(ino: INodeNo) -> FileAttr {
    let directory = ino == INodeNo::ROOT;
    FileAttr {
        ino,
        size: if directory { 0 } else { SIZE as u64 },
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

fn write(bytes: &Mutex<Vec<u8>>, offset: u64, data: &[u8], reply: ReplyWrite) {
    match bytes.lock().get_mut(offset as usize..offset as usize + data.len()) {
        Some(place) => place.copy_from_slice(data),
        None => return reply.error(Errno::ENOSPC),
    }
    reply.written(data.len() as u32);
}

impl Filesystem for Late {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without this capability, the kernel sends writes one at a time.
        config
            .add_capabilities(InitFlags::FUSE_ASYNC_DIO)
            .map_err(|_| io::ErrorKind::Unsupported)?;
        Ok(())
    }

    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name == NAME {
            true => reply.entry(&Duration::ZERO, &attributes(FILE), Generation(0)),
            false => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&Duration::ZERO, &attributes(ino));
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
        let bytes = self.bytes.lock();
        let end = SIZE.min(offset as usize + size as usize);
        reply.data(bytes.get(offset as usize..end).unwrap_or_default());
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
        let (held, landed) = (self.orders.join("held"), self.orders.join("landed"));
        if std::fs::rename(self.orders.join("hold"), &held).is_err() {
            return write(&self.bytes, offset, data, reply);
        }
        let (bytes, data) = (Arc::clone(&self.bytes), data.to_vec());
        std::thread::spawn(move || {
            while held.exists() {
                wait::pause();
            }
            write(&bytes, offset, &data, reply);
            std::fs::write(landed, "").unwrap();
        });
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }
}

/// Runs the daemon and ends the process, if this process was started as the daemon. Otherwise
/// returns.
pub fn run_daemon_if_requested() {
    let Some(path) = std::env::var_os(MOUNT_AT) else { return };
    let path = PathBuf::from(path);
    let bytes = Arc::new(Mutex::new(vec![0; SIZE]));
    let late = Late { bytes, orders: path.with_file_name("orders") };
    let outcome = Session::new(late, &path, &Config::default()).and_then(Session::run);
    std::process::exit(i32::from(outcome.is_err()));
}

/// A block device with a delayed write.
pub struct LateDevice {
    daemon: Child,
    directory: tempfile::TempDir,
    device: PathBuf,
}

impl LateDevice {
    /// Creates the device. Returns `None` if the machine lacks FUSE, loop devices or the privilege.
    /// `test` is the full name of a test of this program that calls [`run_daemon_if_requested`].
    ///
    /// # Panics
    ///
    /// If the daemon does not start.
    #[must_use]
    pub fn new(test: &str) -> Option<Self> {
        let has = |path: &str| Path::new(path).exists();
        let is_root = rustix::process::geteuid().is_root();
        if !is_root || !has("/dev/fuse") || !has("/dev/loop-control") {
            crate::programs::skipped("needs root, /dev/fuse and a loop device");
            return None;
        }
        let directory = tempfile::tempdir().unwrap();
        let mount = directory.path().join("mount");
        std::fs::create_dir(&mount).unwrap();
        std::fs::create_dir(directory.path().join("orders")).unwrap();
        let daemon = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(MOUNT_AT, &mount)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut late = Self { daemon, directory, device: PathBuf::new() };
        let file = mount.join(NAME);
        wait::until("the daemon's file", || file.exists());
        let arguments = ["--find", "--show", "--direct-io=on"];
        let output = Command::new("losetup").args(arguments).arg(&file).output().ok()?;
        late.device = String::from_utf8_lossy(&output.stdout).trim().into();
        let name = late.device.file_name()?.to_string_lossy().into_owned();
        let direct = std::fs::read_to_string(format!("/sys/block/{name}/loop/dio")).ok()?;
        if direct.trim() != "1" {
            crate::programs::skipped("needs a loop device that bypasses the page cache");
            return None;
        }
        Some(late)
    }

    /// Path of the device.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.device
    }

    fn order(&self, name: &str) -> PathBuf {
        self.directory.path().join("orders").join(name)
    }

    /// Makes the daemon hold the next write.
    ///
    /// # Panics
    ///
    /// If the instruction cannot be written.
    pub fn hold_next(&self) {
        std::fs::write(self.order("hold"), "").unwrap();
    }

    /// Waits until the daemon holds a write.
    ///
    /// # Panics
    ///
    /// If the daemon holds none in time.
    pub fn until_held(&self) {
        wait::until("a write", || self.order("held").exists());
    }

    /// Releases the held write, and waits until it has arrived.
    ///
    /// # Panics
    ///
    /// If it does not arrive.
    pub fn release(&self) {
        std::fs::remove_file(self.order("held")).unwrap();
        wait::until("the write's end", || self.order("landed").exists());
    }
}

impl Drop for LateDevice {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.order("held"));
        if !self.device.as_os_str().is_empty() {
            let _ = Command::new("losetup").arg("-d").arg(&self.device).status();
        }
        let mount = self.directory.path().join("mount");
        let _ = rustix::mount::unmount(mount, rustix::mount::UnmountFlags::DETACH);
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}
