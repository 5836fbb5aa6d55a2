//! A disk that is a file or a block device, through io_uring or, where there is none, threads.
//!
//! # Architecture
//!
//! [`FileDisk::open`] finds out what the file is and what its file system can do; nothing of that
//! is tried again under load. Each thread's [`Queue`] has a ring of its own (or threads of its own): requests are prepared
//! as they are submitted, one system call a batch hands them over, and completions are read from
//! shared memory. A request is a small state machine ([`task`]) that goes through one or more
//! calls; short transfers are continued, interrupted ones repeated. The memory that the kernel
//! works on belongs to the ring until it is done with it ([`crate::sys`]).
//!
//! With direct I/O, data whose addresses or lengths the device can not take goes through an
//! aligned bounce buffer, in pieces of bounded size; so does what is only compared or verified.
//!
//! # When the image changes under us
//!
//! A read beyond the end of an image that somebody truncated is `DiskError::OutOfRange`, never
//! zeroes. From the moment that a read or a flush finds the end moved, nothing beyond it is read
//! or written by any queue until the disk is opened again, even if the file has grown back: what
//! was there is lost. A write that comes before either makes the file longer again, as the
//! system's writes do; nobody can tell that from a hole.
//!
//! # When the system can not write back
//!
//! Through the page cache, a write that has completed may still fail. The system tells whoever syncs
//! next, once, and forgets the data: the sync after that succeeds. A host that is told to try again
//! would take that for success. So a sync that has failed goes on failing until the disk is opened
//! again; writes that are durable by themselves do not, and neither does direct I/O, where nothing is
//! forgotten.
//!
//! # What it does not do
//!
//! Verify reads through the page cache if the disk uses it; only direct I/O reaches the medium.

mod open;
mod queue;
mod task;
#[cfg(test)]
mod tests;

use crate::sys::Means;
use crate::{Disk, DiskError, Info, Op, OpenError, Queue, Request};
use shadowbell_memory::SharedBytes;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

/// How to open a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileOptions {
    /// Bytes in a logical block, 512 or 4096; `None` for 512, or a block device's own.
    pub block_size: Option<u32>,
    /// Refuse writes, though the file may allow them.
    pub read_only: bool,
    /// Whether to bypass the page cache.
    pub direct: Direct,
    /// How the system is called.
    pub aio: Aio,
}

/// How the system is called, so that many requests are under way at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aio {
    /// Through io_uring, or by threads if the system refuses it.
    #[default]
    Auto,
    /// Through io_uring, or do not open at all.
    IoUring,
    /// By threads: up to 64 for each queue.
    Threads,
}

/// Whether to bypass the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// If the file system allows it for requests of one logical block.
    #[default]
    Auto,
    /// Or do not open at all.
    On,
    /// Do not.
    Off,
}

/// A raw image or a block device.
///
/// While it is open, the image is locked against other writers, and if it is writable against
/// other readers, with the kind of lock that QEMU uses.
#[derive(Debug)]
pub struct FileDisk {
    shared: Arc<Shared>,
    path: PathBuf,
}

/// What all queues of a disk share; read by every request, written when something goes wrong.
#[derive(Debug)]
struct Shared {
    file: Arc<File>,
    info: Info,
    /// The alignments of direct I/O; `None` if the page cache is used.
    direct: Option<Alignment>,
    means: Means,
    /// Why it is threads, though nobody asked for them.
    no_uring: Option<String>,
    /// The file is a regular one, whose end can move.
    regular: bool,
    /// The end of what can still be read, in bytes; less than the disk once it shrank.
    end: AtomicU64,
    /// The error number of the first sync that has failed through the page cache, or 0.
    unsynced: AtomicI32,
    /// The file system has no way to zero a range and keep its blocks.
    no_zero_range: AtomicBool,
    /// The file system has no way to punch a hole.
    no_punch: AtomicBool,
    /// The byte of the disk that was last refused for want of room, and one; 0 if none, or if it has
    /// been taken since.
    full: AtomicU64,
    /// Zeroes to write where nothing better works. Never written, so they take no memory.
    zeroes: SharedBytes,
}

/// What direct I/O asks for, in bytes, powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Alignment {
    /// Of addresses in memory.
    memory: usize,
    /// Of offsets and lengths.
    offset: usize,
}

impl FileDisk {
    /// Opens the image or block device at `path`.
    ///
    /// # Errors
    /// [`OpenError`], in a sentence that says what is wrong with the file and what to do.
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        open::open(path, options)
    }

    /// Whether the page cache is bypassed.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.shared.direct.is_some()
    }
}

impl Disk for FileDisk {
    fn info(&self) -> Info {
        self.shared.info.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(queue::FileQueue::new(Arc::clone(&self.shared))?))
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn has_lost(&self) -> bool {
        self.shared.unsynced().is_some()
    }

    fn is_full(&self) -> bool {
        self.shared.full.load(Ordering::Relaxed) != 0
    }

    fn remark(&self) -> Option<String> {
        let why = self.shared.no_uring.as_ref()?;
        Some(format!(
            "{}: read and written by threads, which takes more processor time: the system refuses \
             io_uring ({why}); it needs Linux 5.6 or later, `sysctl kernel.io_uring_disabled=0`, and no \
             container profile that forbids it. With `aio=threads` nothing is said",
            self.path.display()
        ))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        crate::sys::unlock_image(&self.file);
    }
}

impl Shared {
    /// Whether everything up to `end` is still there, as far as anybody has noticed.
    #[inline]
    fn reaches(&self, end: u64) -> bool {
        end <= self.end.load(Ordering::Relaxed)
    }

    /// Looks where the file ends now. Whether it is shorter than the disk, or was.
    fn has_shrunk(&self) -> bool {
        if !self.regular {
            return false;
        }
        // A file whose size can not be had any more is as good as gone.
        let now = self.file.metadata().map_or(0, |m| m.len());
        // Written only if it changes: every request of every thread reads it.
        if now < self.end.load(Ordering::Relaxed) {
            self.end.fetch_min(now, Ordering::Relaxed);
        }
        !self.reaches(self.info.bytes())
    }

    /// Remembers where there was no room, until the same is written with success. Only that shows that
    /// there is room again: a write elsewhere may be to blocks that the file has.
    fn note_room(&self, request: &Request, result: Result<(), DiskError>) {
        // What was written before the end of a flush had no place of its own, and counts as the end.
        let at = if request.op == Op::Flush { self.info.bytes() } else { request.offset };
        match result {
            Err(DiskError::NoSpace) => self.full.store(at + 1, Ordering::Relaxed),
            Ok(()) => {
                let full = self.full.load(Ordering::Relaxed);
                let covers = at < full && full - 1 < at.saturating_add(request.len.max(1));
                let writes = matches!(
                    request.op,
                    Op::Write { .. } | Op::WriteZeroes { deallocate: false, .. } | Op::Flush
                );
                if covers && writes {
                    self.full.store(0, Ordering::Relaxed);
                }
            }
            Err(_) => {}
        }
    }

    /// A sync has failed: what was written before may be lost, and the next would succeed.
    fn note_unsynced(&self, errno: i32) {
        let passing = matches!(errno, libc::EINTR | libc::EAGAIN | libc::ECANCELED);
        if self.direct.is_none() && !passing {
            let relaxed = Ordering::Relaxed;
            let _ = self.unsynced.compare_exchange(0, errno, relaxed, relaxed);
        }
    }

    /// Why nothing can be said of what was written, if nothing can.
    fn unsynced(&self) -> Option<DiskError> {
        match self.unsynced.load(Ordering::Relaxed) {
            0 => None,
            errno => Some(self.error(errno)),
        }
    }

    /// What a failed call means for the request.
    fn error(&self, errno: i32) -> DiskError {
        match errno {
            // A file larger than the process or the file system may write is a full disk, too.
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => DiskError::NoSpace,
            libc::ECANCELED => DiskError::Cancelled,
            other => DiskError::Io(other),
        }
    }
}
