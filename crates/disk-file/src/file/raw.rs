//! Raw file access for callers that have their own io_uring. The memory of their requests may be
//! inaccessible for this process, such as the kernel's buffers of a block device request.
//!
//! [`Task`] interprets the results, as in a queue of the disk: a short transfer is continued, a
//! read beyond the end of a truncated file is an error, and a full disk is recorded.

use super::disk::FileDisk;
use super::shared::{Alignment, FileShared};
use super::task::{Stage, Step, Task};
use super::write_atomicity::WriteAtomicity;
use crate::sys::{Call, EngineKind};
use shadowbell_disk::{Disk, DiskError, Op, Request};
use shadowbell_memory::Segments;
use std::any::Any;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Raw image or block device of a disk, open for direct I/O. The file stays open and locked as long
/// as this value exists.
#[derive(Clone, Debug)]
pub struct RawFile {
    shared: Arc<FileShared>,
    align: Alignment,
}

/// System call that the caller has to make: a read or write of the file at `offset`, into or from
/// the memory of the request, from byte `skip` of that memory on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawCall {
    /// True for a write, false for a read.
    pub writes: bool,
    /// True if the data must be on stable storage when the write ends (`RWF_DSYNC`).
    pub dsync: bool,
    /// Offset in the request's memory, in bytes.
    pub skip: u64,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Length in bytes. The system call may transfer fewer bytes.
    pub len: u64,
}

/// Next step of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RawStep {
    /// The caller has to make the system call that [`RawTransfer::call`] describes.
    Call,
    /// The request has ended.
    End(Result<(), DiskError>),
    /// The storage cannot access this memory. The caller may submit the whole request to a
    /// [`Queue`](shadowbell_disk::Queue) of the disk instead, with other memory.
    Refused,
}

impl RawFile {
    /// Returns the file of `disk`. `None` if the disk has a layer, because raw access would bypass
    /// it, or if the disk's requests need a queue.
    #[must_use]
    pub fn of(disk: &dyn Disk) -> Option<Self> {
        let disk: &dyn Any = disk;
        Self::of_shared(&disk.downcast_ref::<FileDisk>()?.shared)
    }

    /// Returns the file of a disk whose requests need none of the functions that only a queue has:
    /// range locks for blocks longer than those of the device, aligned bounce buffers, NVMe
    /// commands, and threads.
    fn of_shared(shared: &Arc<FileShared>) -> Option<Self> {
        #[cfg(feature = "scripted")]
        if shared.script.is_some() {
            return None;
        }
        let is_plain = shared.engine == EngineKind::Uring
            && shared.namespace.is_none()
            && shared.ranges.is_none()
            // An atomic write must come from one contiguous buffer. If data have several segments,
            // a queue copies them to a contiguous buffer, but raw access does not.
            && shared.atom != WriteAtomicity::Requested;
        let align = shared.direct.filter(|_| is_plain)?;
        Some(Self { shared: Arc::clone(shared), align })
    }

    /// Alignment that calls require. The storage may [refuse](RawStep::Refused) a call on memory
    /// without this alignment.
    #[must_use]
    pub fn alignment(&self) -> Alignment {
        self.align
    }

    /// Starts a read or write. The memory of the caller must be as long as the request.
    ///
    /// # Errors
    /// The result of the request, if the request ends without a system call. This result may be
    /// `Ok`.
    pub fn begin(&self, request: &Request) -> Result<RawTransfer, Result<(), DiskError>> {
        let info = &self.shared.info;
        let (begin, len) = (request.offset, request.len);
        let end = begin.checked_add(len).filter(|end| *end <= info.bytes());
        if end.is_none() || !(begin | len).is_multiple_of(u64::from(info.block_size)) {
            return Err(Err(DiskError::OutOfRange));
        }
        match request.op {
            Op::Read => {}
            Op::Write { .. } if info.read_only => return Err(Err(DiskError::ReadOnly)),
            Op::Write { .. } => {}
            _ => return Err(Err(DiskError::Unsupported)),
        }
        // The list of segments is empty, because the memory may not be mapped in this process.
        Ok(RawTransfer(Task::new(0, request, &Segments::new(), &self.shared)?))
    }
}

impl AsFd for RawFile {
    /// Returns the file, which is open for direct I/O.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.file.as_fd()
    }
}

/// A read or write in flight.
#[derive(Debug)]
pub struct RawTransfer(Task);

impl RawTransfer {
    /// The call to make next.
    #[must_use]
    pub fn call(&self) -> Option<RawCall> {
        let next = self.0.call()?;
        let dsync = match next.call {
            Call::Read(_) => false,
            Call::Write { dsync, .. } => dsync,
            Call::Punch | Call::ZeroRange | Call::Deallocate => return None,
        };
        Some(RawCall {
            writes: matches!(next.call, Call::Write { .. }),
            dsync,
            skip: next.skip as u64,
            offset: next.offset,
            len: next.len,
        })
    }

    /// Processes the result of a call: the number of transferred bytes, or a negative error number.
    pub fn ended(&mut self, result: i32, file: &RawFile) -> RawStep {
        let step = self.0.outcome(result, &file.shared);
        if matches!(self.0.stage, Stage::Bounced { .. }) {
            return RawStep::Refused;
        }
        match step {
            Step::Call | Step::Piece => RawStep::Call,
            Step::End(result) => {
                let is_full = file.shared.full.load(Ordering::Relaxed) != 0;
                if result == Err(DiskError::NoSpace) || is_full {
                    file.shared.note_room(self.0.request(), result);
                }
                RawStep::End(result)
            }
        }
    }

    /// Cancels the request. The current call is not interrupted. If it fails or transfers only a
    /// part, the request ends without another call.
    pub fn cancel(&mut self) {
        self.0.cancelled = true;
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{memfd, shared};
    use super::*;
    use crate::file::FileDisk;
    use shadowbell_disk::Disk;
    use shadowbell_disk_layers::{LimitedDisk, Limiter, Limits};
    use std::ops::Range;

    const BLOCK: u64 = 512;
    const ALIGN: Alignment = Alignment { memory: 4, offset: 512 };

    /// Creates the state of a file with direct I/O. The test makes no calls on the file.
    fn direct(blocks: u64) -> FileShared {
        let file = memfd(blocks * BLOCK);
        FileShared { direct: Some(ALIGN), regular: true, ..shared(file, blocks * BLOCK) }
    }

    fn disk(shared: FileShared) -> FileDisk {
        FileDisk { shared: Arc::new(shared), path: "test".into() }
    }

    fn read(blocks: Range<u64>) -> Request {
        let (offset, len) = (blocks.start * BLOCK, (blocks.end - blocks.start) * BLOCK);
        Request { op: Op::Read, offset, len }
    }

    fn write(fua: bool) -> Request {
        Request { op: Op::Write { fua }, ..read(0..2) }
    }

    #[test]
    fn only_disks_without_queue_state_have_a_raw_file() {
        let has_one = |shared: FileShared| RawFile::of(&disk(shared)).is_some();
        assert!(has_one(direct(4)));
        assert!(!has_one(FileShared { direct: None, ..direct(4) }), "the page cache");
        assert!(!has_one(FileShared { engine: EngineKind::Threads, ..direct(4) }));
        assert!(!has_one(FileShared { ranges: Some(Arc::default()), ..direct(4) }));
        assert!(!has_one(FileShared { atom: WriteAtomicity::Requested, ..direct(4) }));
        let limited =
            LimitedDisk::new(Arc::new(disk(direct(4))), Limiter::new(Limits::default()), None);
        assert!(RawFile::of(&limited).is_none(), "requests would not wait for their limit");
    }

    #[test]
    fn a_request_is_checked_as_one_to_a_queue_is() {
        let file = RawFile::of(&disk(direct(4))).unwrap();
        assert_eq!(file.alignment(), ALIGN);
        let begin = |request: Request| file.begin(&request).map(|it| it.call());
        let call = RawCall { writes: false, dsync: false, skip: 0, offset: BLOCK, len: 2 * BLOCK };
        assert_eq!(begin(read(1..3)), Ok(Some(call)));
        let writes = |dsync| RawCall { writes: true, dsync, offset: 0, ..call };
        assert_eq!(begin(write(false)), Ok(Some(writes(false))));
        assert_eq!(begin(write(true)), Ok(Some(writes(true))));
        assert_eq!(begin(read(1..1)), Err(Ok(())));
        let beyond = Err(Err(DiskError::OutOfRange));
        assert_eq!(begin(read(3..5)), beyond);
        assert_eq!(begin(Request { offset: 1, ..read(0..1) }), beyond);
        assert_eq!(begin(Request { offset: u64::MAX - BLOCK + 1, ..read(0..2) }), beyond);
        let discard = Request { op: Op::Discard, ..read(0..1) };
        assert_eq!(begin(discard), Err(Err(DiskError::Unsupported)));
        let mut read_only = direct(4);
        read_only.info.read_only = true;
        let file = RawFile::of(&disk(read_only)).unwrap();
        assert!(matches!(file.begin(&write(false)), Err(Err(DiskError::ReadOnly))));
    }

    #[test]
    fn short_transfers_continue_and_errors_end_the_request() {
        let file = RawFile::of(&disk(direct(4))).unwrap();
        let mut moving = file.begin(&read(1..4)).unwrap();
        assert_eq!(moving.ended(-libc::EINTR, &file), RawStep::Call);
        // Direct I/O cannot continue at an unaligned offset. So the transfer continues after the
        // last whole aligned unit.
        assert_eq!(moving.ended(BLOCK as i32 + 100, &file), RawStep::Call);
        let call = moving.call().unwrap();
        assert_eq!((call.skip, call.offset, call.len), (BLOCK, 2 * BLOCK, 2 * BLOCK));
        assert_eq!(moving.ended(2 * BLOCK as i32, &file), RawStep::End(Ok(())));

        let mut odd = file.begin(&read(0..1)).unwrap();
        assert_eq!(odd.ended(-libc::EINVAL, &file), RawStep::Refused);
        let mut broken = file.begin(&read(0..1)).unwrap();
        let failed = RawStep::End(Err(DiskError::Io(libc::EIO)));
        assert_eq!(broken.ended(-libc::EIO, &file), failed);
        let mut late = file.begin(&read(0..1)).unwrap();
        late.cancel();
        let cancelled = RawStep::End(Err(DiskError::Cancelled));
        assert_eq!(late.ended(-libc::ECANCELED, &file), cancelled);
    }

    #[test]
    fn reads_beyond_a_truncated_end_fail() {
        let file = RawFile::of(&disk(direct(4))).unwrap();
        let truncate = |blocks| file.shared.file.set_len(blocks * BLOCK).unwrap();
        let mut moving = file.begin(&read(2..4)).unwrap();
        truncate(3);
        assert_eq!(moving.ended(BLOCK as i32, &file), RawStep::Call, "up to the end");
        let gone = Err(DiskError::OutOfRange);
        assert_eq!(moving.ended(0, &file), RawStep::End(gone));
        // After a truncation was detected, all later requests beyond that end fail, even if the
        // file grows back.
        truncate(4);
        assert!(matches!(file.begin(&read(3..4)), Err(Err(DiskError::OutOfRange))));
        assert!(file.begin(&write(false)).is_ok());
    }

    #[test]
    fn a_full_disk_is_reported_until_a_write_succeeds() {
        let disk = disk(direct(4));
        let file = RawFile::of(&disk).unwrap();
        let mut moving = file.begin(&write(false)).unwrap();
        let full = RawStep::End(Err(DiskError::NoSpace));
        assert_eq!(moving.ended(-libc::ENOSPC, &file), full);
        assert!(disk.is_full());
        let mut moving = file.begin(&write(false)).unwrap();
        assert_eq!(moving.ended(2 * BLOCK as i32, &file), RawStep::End(Ok(())));
        assert!(!disk.is_full());
    }
}
