//! What all queues of a file disk share.

use super::atom::Atom;
use super::flusher::Flusher;
use super::namespace::NamespaceFacts;
use super::opener;
use super::ranges::Ranges;
use crate::info::DiskInfo;
use crate::request::{DiskError, Op, Request};
use crate::sys::{EngineKind, NVME_STATUS};
use serde::{Deserialize, Serialize};
use shadowbell_memory::SharedBytes;
use shadowbell_spec::Status;
use shadowbell_spec::status::StatusCodeType;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What all queues of a disk share; read by every request, written when something goes wrong.
#[derive(Debug)]
pub(super) struct FileShared {
    pub(super) file: Arc<File>,
    pub(super) info: DiskInfo,
    /// The alignments of direct I/O; `None` if the page cache is used.
    pub(super) direct: Option<Alignment>,
    pub(super) engine: EngineKind,
    /// Why it is threads, though they were not asked for.
    pub(super) no_uring: Option<String>,
    /// It can not be asked to fail rather than wait.
    pub(super) waits: bool,
    /// The file is the character device of this.
    pub(super) namespace: Option<NamespaceFacts>,
    /// The file is a regular one, whose end can move.
    pub(super) regular: bool,
    /// The end of what can still be read, in bytes; less than the disk once it shrank.
    pub(super) end: AtomicU64,
    /// Its syncs.
    pub(super) flusher: Arc<Flusher>,
    /// The file system has no way to zero a range and keep its blocks.
    pub(super) no_zero_range: AtomicBool,
    /// The file system has no way to punch a hole.
    pub(super) no_punch: AtomicBool,
    /// The byte of the disk that was last refused for want of room, and one; 0 if none, or if it
    /// has been taken since.
    pub(super) full: AtomicU64,
    /// What keeps a block whole when the power goes.
    pub(super) atom: Atom,
    /// What is read and written now, if blocks do not stay whole by themselves.
    pub(super) ranges: Option<Arc<Ranges>>,
    /// What it has together with the same disk in another size.
    pub(super) hold: Arc<Hold>,
    /// Zeroes to write where nothing better works. Never written, so they take no memory.
    pub(super) zeroes: SharedBytes,
    /// A test says how calls end.
    #[cfg(feature = "scripted")]
    pub(super) script: Option<super::script::Script>,
}

/// What direct I/O asks for, in bytes, powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alignment {
    /// Of addresses in memory.
    pub memory: usize,
    /// Of offsets and lengths.
    pub offset: usize,
}

/// The lock of an image and the thread of its syncs: of a disk, and of the same one in another
/// size. Both go with the last of them.
#[derive(Debug)]
pub(super) struct Hold {
    file: Arc<File>,
    flusher: Arc<Flusher>,
    /// Another process has the same open file, and so the same lock.
    pub(super) lock_is_shared: AtomicBool,
}

/// What keeps blocks of so many bytes whole, if it is needed: with direct I/O the device does, if
/// they are its own.
pub(super) fn ranges(direct: Option<Alignment>, block_size: u32) -> Option<Arc<Ranges>> {
    let is_whole = direct.is_some_and(|align| align.offset >= block_size as usize);
    (!is_whole).then(Arc::default)
}

impl Hold {
    pub(super) fn new(file: &Arc<File>, flusher: &Arc<Flusher>, lock_is_shared: bool) -> Arc<Self> {
        let (file, flusher) = (Arc::clone(file), Arc::clone(flusher));
        Arc::new(Self { file, flusher, lock_is_shared: AtomicBool::new(lock_is_shared) })
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.flusher.close();
        if !self.lock_is_shared.load(Ordering::Relaxed) {
            crate::sys::unlock_image(&self.file);
        }
    }
}

impl FileShared {
    /// Bytes of the file, as of now.
    pub(super) fn size(&self) -> io::Result<u64> {
        if self.namespace.is_some() {
            let named = opener::name_of(&self.file)?;
            return Ok(opener::identify(named.as_fd(), false)?.bytes());
        }
        // The end of a block device is found by seeking; nothing else uses the position.
        (&*self.file).seek(SeekFrom::End(0))
    }

    /// The same disk as `info` has it, which differs in its size, or in whether it takes writes.
    /// `end` is that of the file.
    pub(super) fn resized(&self, info: DiskInfo, end: u64) -> Self {
        let copy = |flag: &AtomicBool| AtomicBool::new(flag.load(Ordering::Relaxed));
        Self {
            file: Arc::clone(&self.file),
            info,
            direct: self.direct,
            engine: self.engine,
            no_uring: self.no_uring.clone(),
            waits: self.waits,
            regular: self.regular,
            end: AtomicU64::new(end),
            flusher: Arc::clone(&self.flusher),
            no_zero_range: copy(&self.no_zero_range),
            no_punch: copy(&self.no_punch),
            namespace: self.namespace.clone(),
            full: AtomicU64::new(self.full.load(Ordering::Relaxed)),
            atom: self.atom,
            ranges: self.ranges.clone(),
            hold: Arc::clone(&self.hold),
            zeroes: self.zeroes.clone(),
            #[cfg(feature = "scripted")]
            script: self.script.clone(),
        }
    }

    /// Whether everything up to `end` is still there, as far as it was noticed.
    #[inline]
    pub(super) fn reaches(&self, end: u64) -> bool {
        end <= self.end.load(Ordering::Relaxed)
    }

    /// The file was seen to end at `now`. Whether it is shorter than the disk, or was.
    pub(super) fn ends_at(&self, now: u64) -> bool {
        if !self.regular {
            return false;
        }
        // Written only if it changes: every request of every thread reads it.
        if now < self.end.load(Ordering::Relaxed) {
            self.end.fetch_min(now, Ordering::Relaxed);
        }
        !self.reaches(self.info.bytes())
    }

    /// Looks where the file ends, for who has just had an answer from its storage: a file system
    /// may ask somebody else for that. As [`ends_at`](Self::ends_at).
    pub(super) fn has_shrunk(&self) -> bool {
        // A file whose size can not be had has not become shorter: its storage is gone.
        self.regular && self.file.metadata().is_ok_and(|about| self.ends_at(about.len()))
    }

    /// Remembers where there was no room, until the same place is written with success. Only that
    /// shows that there is room again: a write elsewhere may be to blocks that the file has.
    pub(super) fn note_room(&self, request: &Request, result: Result<(), DiskError>) {
        // What was written before the end of a flush had no place of its own, and counts as the
        // end.
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

    /// Why nothing can be said of what was written, if nothing can.
    pub(super) fn unsynced(&self) -> Option<DiskError> {
        match self.flusher.lost() {
            0 => None,
            errno => Some(self.error(errno)),
        }
    }

    /// What a failed call means for the request.
    pub(super) fn error(&self, errno: i32) -> DiskError {
        match errno {
            // A file larger than the process or the file system may write is a full disk, too.
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => DiskError::NoSpace,
            libc::ECANCELED => DiskError::Cancelled,
            status if status >= NVME_STATUS => {
                of_device(Status::from_bits((status - NVME_STATUS) as u16))
            }
            other => DiskError::Io(other),
        }
    }
}

/// What a device has answered, or the system in its place, which may be worth another attempt: the
/// device was reset, or is not ready yet.
pub(super) fn is_passing(errno: i32) -> bool {
    if errno < NVME_STATUS {
        return matches!(errno, libc::EINTR | libc::EAGAIN);
    }
    let status = Status::from_bits((errno - NVME_STATUS) as u16);
    !status.dnr() && (is_systems(status) || status.code() == Status::NAMESPACE_NOT_READY)
}

/// Whether it is the system that says so, which has no answer of the device.
fn is_systems(status: Status) -> bool {
    status.code_type() == StatusCodeType::Path && status.bits() & 0xf0 == 0x70
}

/// What the status of a device means.
fn of_device(status: Status) -> DiskError {
    match status.code() {
        Status::LBA_OUT_OF_RANGE => DiskError::OutOfRange,
        Status::CAPACITY_EXCEEDED => DiskError::NoSpace,
        // It has lost the device.
        _ if is_systems(status) => DiskError::Io(libc::EIO),
        // More (M) and the retry delay (CRD) refer to the device's own log and clock.
        code if status.dnr() => DiskError::Device(code.with_dnr().bits()),
        code => DiskError::Device(code.bits()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_devices_answers_are_the_hosts() {
        let of = |bits| of_device(Status::from_bits(bits));
        assert_eq!(of(0x4080), DiskError::OutOfRange);
        assert_eq!(of(0x81), DiskError::NoSpace);
        assert_eq!(of(0x281), DiskError::Device(0x281), "an unrecovered read error");
        assert_eq!(of(0x7a81), DiskError::Device(0x4281), "what it refers to is the device's own");
        assert_eq!(of(0x371), DiskError::Io(libc::EIO));
        let passes = |bits: u16| is_passing(NVME_STATUS + i32::from(bits));
        assert!(passes(0x371) && passes(0x370) && passes(0x82) && is_passing(libc::EINTR));
        assert!(!passes(0x4371) && !passes(0x281) && !passes(0x06) && !is_passing(libc::EIO));
        assert!(!passes(0x302), "an inaccessible path is the device's own word");
    }
}
