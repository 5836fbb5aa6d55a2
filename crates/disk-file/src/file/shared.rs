//! State that all queues of a file-backed disk share.

use super::flusher::Flusher;
use super::namespace::NamespaceFacts;
use super::opener::{self, ImageUse};
use super::ranges::Ranges;
use super::write_atomicity::WriteAtomicity;
use crate::sys::{EngineKind, NVME_STATUS};
use serde::{Deserialize, Serialize};
use shadowbell_disk::{DiskError, DiskInfo, Op, Request};
use shadowbell_memory::SharedBytes;
use shadowbell_spec::Status;
use shadowbell_spec::status::StatusCodeType;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// State that all queues of a disk share. Every request reads this state. After the disk was
/// opened, only failures change it.
#[derive(Debug)]
pub(super) struct FileShared {
    pub(super) file: Arc<File>,
    pub(super) info: DiskInfo,
    /// Alignment of direct I/O; `None` if the page cache is used.
    pub(super) direct: Option<Alignment>,
    pub(super) engine: EngineKind,
    /// Reason why threads are used instead of io_uring, if they were not requested by the user.
    pub(super) no_uring: Option<String>,
    /// True if the file system does not support `RWF_NOWAIT`.
    pub(super) waits: bool,
    /// Identify data, if the file is an NVMe generic character device.
    pub(super) namespace: Option<NamespaceFacts>,
    /// True for a regular file, which can be truncated. False for a device.
    pub(super) regular: bool,
    /// End of the readable bytes. It is below the disk size after a truncation.
    pub(super) end: AtomicU64,
    /// Serialized syncs of the file.
    pub(super) flusher: Arc<Flusher>,
    /// True if the file system cannot zero a range and keep its blocks.
    pub(super) no_zero_range: AtomicBool,
    /// True if the file system cannot punch a hole.
    pub(super) no_punch: AtomicBool,
    /// Position, plus one, of the last write that failed for lack of space. 0 if there was none, or
    /// if a later write to that position has succeeded.
    pub(super) full: AtomicU64,
    /// Power-fail atomicity of blocks.
    pub(super) atom: WriteAtomicity,
    /// Range locks. `None` if the file system or the device reads and writes blocks atomically.
    pub(super) ranges: Option<Arc<Ranges>>,
    /// State that resized versions of the disk share.
    pub(super) handle: Arc<OpenHandle>,
    /// Memory that contains only zeroes, and is written to file systems that cannot zero ranges
    /// themselves. It is never modified, so the kernel allocates no physical memory for it.
    pub(super) zeroes: SharedBytes,
    /// Test script that determines the results of system calls.
    #[cfg(feature = "scripted")]
    pub(super) script: Option<super::test_script::Script>,
}

/// Alignment of direct I/O. Its values are powers of two, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Alignment {
    /// Alignment of memory addresses.
    pub memory: usize,
    /// Alignment of offsets and lengths.
    pub offset: usize,
}

/// Image lock, sync thread, and use of the image. A disk and its resized versions share them; all
/// end when the last of these disks is dropped.
#[derive(Debug)]
pub(super) struct OpenHandle {
    file: Arc<File>,
    _used: Option<ImageUse>,
    flusher: Arc<Flusher>,
    /// True if the lock also belongs to another owner of the open file (another process, or an
    /// `ImageFile`). Dropping this handle must then not release it.
    lock_is_shared: bool,
}

/// Creates range locks for blocks of `block_size` bytes, if the page cache is used or a block is
/// longer than one of the device. With direct I/O, a device reads and writes each of its own blocks
/// atomically.
pub(super) fn ranges(direct: Option<Alignment>, block_size: u32) -> Option<Arc<Ranges>> {
    let is_whole = direct.is_some_and(|align| align.offset >= block_size as usize);
    (!is_whole).then(Arc::default)
}

impl OpenHandle {
    pub(super) fn new(
        file: &Arc<File>,
        used: Option<ImageUse>,
        flusher: &Arc<Flusher>,
        lock_is_shared: bool,
    ) -> Arc<Self> {
        let (file, flusher) = (Arc::clone(file), Arc::clone(flusher));
        Arc::new(Self { file, _used: used, flusher, lock_is_shared })
    }
}

impl Drop for OpenHandle {
    fn drop(&mut self) {
        self.flusher.close();
        if !self.lock_is_shared {
            crate::sys::unlock_image(&self.file);
        }
    }
}

impl FileShared {
    /// Current size of the file in bytes.
    pub(super) fn size(&self) -> io::Result<u64> {
        if self.namespace.is_some() {
            let named = opener::name_of(&self.file)?;
            return Ok(opener::identify(named.as_fd(), false)?.bytes());
        }
        // A seek finds the end of a regular file and of a block device. No other code uses the file
        // position.
        (&*self.file).seek(SeekFrom::End(0))
    }

    /// Creates the state of a version of the disk with another size or write protection (`info`).
    /// `end` is the current end of the file.
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
            handle: Arc::clone(&self.handle),
            zeroes: self.zeroes.clone(),
            #[cfg(feature = "scripted")]
            script: self.script.clone(),
        }
    }

    /// True if no truncation of the file to less than `end` bytes was detected.
    #[inline]
    pub(super) fn reaches(&self, end: u64) -> bool {
        end <= self.end.load(Ordering::Relaxed)
    }

    /// Records that the file has `now` bytes. Returns true if the file is shorter than the disk, or
    /// was so at an earlier call.
    pub(super) fn record_size(&self, now: u64) -> bool {
        if !self.regular {
            return false;
        }
        // The value is stored only if it changes, because every request of every thread reads it.
        if now < self.end.load(Ordering::Relaxed) {
            self.end.fetch_min(now, Ordering::Relaxed);
        }
        !self.reaches(self.info.bytes())
    }

    /// Reads the file size and calls [`record_size`](Self::record_size). May only be called
    /// directly after the storage has completed a call: on a remote file system that does not
    /// answer, this call would block.
    pub(super) fn has_shrunk(&self) -> bool {
        // If the size cannot be read, the storage is unavailable, and the file may be unchanged.
        self.regular && self.file.metadata().is_ok_and(|about| self.record_size(about.len()))
    }

    /// Records the position of a write that found no space, until a write to the same position
    /// succeeds. A successful write elsewhere does not count, because its blocks may have been
    /// allocated already.
    pub(super) fn note_room(&self, request: &Request, result: Result<(), DiskError>) {
        // A failed flush has no position. It is recorded at the end of the disk.
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

    /// Error with which a flush fails after lost data. `None` if no data were lost.
    pub(super) fn unsynced(&self) -> Option<DiskError> {
        match self.flusher.lost() {
            0 => None,
            errno => Some(self.error(errno)),
        }
    }

    /// Converts the error number of a failed call.
    pub(super) fn error(&self, errno: i32) -> DiskError {
        match errno {
            // `EFBIG` means that the file would exceed a limit of the process or the file system.
            // It counts as a full disk.
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => DiskError::NoSpace,
            libc::ECANCELED => DiskError::Cancelled,
            status if status >= NVME_STATUS => {
                of_device(Status::from_bits((status - NVME_STATUS) as u16))
            }
            other => DiskError::Io(other),
        }
    }
}

/// True for an error after which the system call is repeated: it was interrupted, or the device was
/// reset or is not ready.
pub(super) fn is_passing(errno: i32) -> bool {
    if errno < NVME_STATUS {
        return matches!(errno, libc::EINTR | libc::EAGAIN);
    }
    let status = Status::from_bits((errno - NVME_STATUS) as u16);
    !status.dnr() && (is_systems(status) || status.code() == Status::NAMESPACE_NOT_READY)
}

/// True if the status was generated by the kernel of this host (Path Related, 7xh), because the
/// device has returned none.
fn is_systems(status: Status) -> bool {
    status.code_type() == StatusCodeType::Path && status.bits() & 0xf0 == 0x70
}

/// Converts an NVMe status of the device.
fn of_device(status: Status) -> DiskError {
    match status.code() {
        Status::LBA_OUT_OF_RANGE => DiskError::OutOfRange,
        Status::CAPACITY_EXCEEDED => DiskError::NoSpace,
        // The kernel cannot reach the device, so there is no status that could be reported.
        _ if is_systems(status) => DiskError::Io(libc::EIO),
        // The bits More (M) and Command Retry Delay (CRD) are dropped, because they refer to the
        // device's own log and clock.
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
