//! The one file, as the kernel asks for it.

use crate::failures::FailureCount;
use fuser::{
    CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow, WriteFlags,
};
use shadowbell_block::{BlockDevice, BlockError, Blocking, Zeroes};
use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

/// Nothing that the kernel remembers about the file ever changes.
const REMEMBER: Duration = Duration::from_secs(3600);
/// The most bytes of a request: 256 pages, what the kernel allows.
const MAX_REQUEST: u32 = 1 << 20;
/// The most bytes of a copy, which goes on until it is done: a program that wants more asks again.
const MAX_COPY: u64 = 64 << 20;
/// Asynchronous requests that the kernel may have under way.
const BACKGROUND: u16 = 256;

/// Bits of the mode of `fallocate(2)`.
mod mode {
    pub(super) const KEEP_SIZE: i32 = 0x01;
    pub(super) const PUNCH_HOLE: i32 = 0x02;
    pub(super) const ZERO_RANGE: i32 = 0x10;
}

/// Which of the two ends `lseek(2)` looks for.
const SEEK_DATA: i32 = 3;
const SEEK_HOLE: i32 = 4;

thread_local! {
    /// This thread's queue of the disk, and memory for data that it reads.
    static OWN: RefCell<(Option<usize>, Vec<u8>)> = const { RefCell::new((None, Vec::new())) };
}

/// A file that is a disk: always there, always of the same size, never cached by the kernel.
pub(super) struct DiskFile {
    disk: BlockDevice,
    attributes: FileAttr,
    threads: AtomicUsize,
    failures: Arc<FailureCount>,
}

impl DiskFile {
    pub(super) fn new(disk: BlockDevice, failures: Arc<FailureCount>) -> Self {
        let geometry = disk.geometry();
        let now = SystemTime::now();
        let attributes = FileAttr {
            ino: INodeNo::ROOT,
            size: geometry.bytes,
            blocks: geometry.bytes / 512,
            atime: now,
            mtime: now,
            ctime: now,
            crtime: now,
            kind: FileType::RegularFile,
            perm: if geometry.read_only { 0o400 } else { 0o600 },
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: geometry.block_size.max(4096),
            flags: 0,
        };
        Self { disk, attributes, threads: AtomicUsize::new(0), failures }
    }

    fn size(&self) -> u64 {
        self.attributes.size
    }

    /// Runs something on this thread's queue, with this thread's memory.
    fn with<T>(&self, run: impl FnOnce(&Blocking, &mut Vec<u8>) -> T) -> T {
        OWN.with_borrow_mut(|(queue, memory)| {
            let queue = *queue.get_or_insert_with(|| self.threads.fetch_add(1, Ordering::Relaxed));
            run(&Blocking::new(self.disk.on_queue(queue)), memory)
        })
    }

    /// The kernel's number for what went wrong.
    fn errno(&self, error: &BlockError) -> Errno {
        let errno = error.errno();
        if errno == rustix::io::Errno::IO {
            self.failures.record(error);
        }
        if matches!(error, BlockError::ReadOnly) {
            return Errno::EROFS;
        }
        Errno::from_i32(errno.raw_os_error())
    }

    fn answer(&self, outcome: &Result<(), BlockError>, reply: ReplyEmpty) {
        match outcome {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.errno(error)),
        }
    }

    /// How many of `len` bytes from `offset` on there are.
    fn clip(&self, offset: u64, len: u64) -> u64 {
        len.min(self.size().saturating_sub(offset))
    }
}

impl Filesystem for DiskFile {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
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

    fn lookup(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        // A file has nothing in it.
        reply.error(Errno::ENOTDIR);
    }

    fn getattr(&self, _: &Request, _: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&REMEMBER, &self.attributes);
    }

    fn setattr(
        &self,
        _: &Request,
        _: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let owned = mode.is_none() && uid.is_none() && gid.is_none();
        if owned && size.is_none_or(|size| size == self.size()) {
            reply.attr(&REMEMBER, &self.attributes);
        } else {
            reply.error(Errno::EPERM);
        }
    }

    fn open(&self, _: &Request, _: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if self.disk.geometry().read_only && flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        let flags = FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES;
        reply.opened(FileHandle(0), flags);
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
        let len = self.clip(offset, size.into()) as usize;
        self.with(|disk, memory| {
            if memory.len() < len {
                memory.resize(len, 0);
            }
            let data = memory.get_mut(..len).unwrap_or_default();
            match disk.read_at(offset, data) {
                Ok(()) => reply.data(data),
                Err(error) => reply.error(self.errno(&error)),
            }
        });
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
        let len = self.clip(offset, data.len() as u64) as usize;
        let data = data.get(..len).unwrap_or_default();
        if data.is_empty() {
            return reply.error(Errno::ENOSPC);
        }
        match self.with(|disk, _| disk.write_at(offset, data, false)) {
            Ok(()) => reply.written(u32::try_from(len).unwrap_or(u32::MAX)),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        // A close promises nothing.
        reply.ok();
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.answer(&self.with(|disk, _| disk.flush()), reply);
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let end = offset.saturating_add(length);
        let grows = mode & mode::KEEP_SIZE == 0 && end > self.size();
        let len = self.clip(offset, length);
        let zeroes = |deallocate| {
            let how = Zeroes { deallocate, ..Zeroes::default() };
            self.with(|disk, _| disk.write_zeroes(offset, len, how))
        };
        const PUNCH: i32 = mode::PUNCH_HOLE | mode::KEEP_SIZE;
        const ZERO: i32 = mode::ZERO_RANGE;
        const ZERO_KEEP: i32 = mode::ZERO_RANGE | mode::KEEP_SIZE;
        match mode {
            _ if grows => reply.error(Errno::ENOSPC),
            PUNCH => self.answer(&zeroes(true), reply),
            ZERO | ZERO_KEEP => self.answer(&zeroes(false), reply),
            // All of the disk is there already.
            0 | mode::KEEP_SIZE => reply.ok(),
            _ => reply.error(Errno::EOPNOTSUPP),
        }
    }

    fn lseek(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let size = i64::try_from(self.size()).unwrap_or(i64::MAX);
        match whence {
            SEEK_DATA | SEEK_HOLE if !(0..size).contains(&offset) => reply.error(Errno::ENXIO),
            // What is a hole is not known.
            SEEK_DATA => reply.offset(offset),
            SEEK_HOLE => reply.offset(size),
            _ => reply.error(Errno::EINVAL),
        }
    }

    fn copy_file_range(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        from: u64,
        _: INodeNo,
        _: FileHandle,
        to: u64,
        len: u64,
        _: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        // There is no other file. Past the end of the disk there is nothing to be read, and no room
        // for anything to be written.
        let there = self.clip(from, len);
        let len = self.clip(to, there).min(MAX_COPY);
        if len == 0 {
            return if there == 0 { reply.written(0) } else { reply.error(Errno::ENOSPC) };
        }
        match self.with(|disk, _| disk.copy(from, to, len)) {
            Ok(()) => reply.written(u32::try_from(len).unwrap_or(u32::MAX)),
            Err(error) => reply.error(self.errno(&error)),
        }
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        let block = self.attributes.blksize;
        reply.statfs(self.size() / u64::from(block), 0, 0, 1, 0, block, 0, block);
    }
}
