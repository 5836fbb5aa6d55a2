//! What an NVMe namespace keeps its bytes in.
//!
//! A [`Disk`] is opened once and shared; each worker thread that serves a queue on it opens a
//! [`Queue`] of its own, which is used by that thread alone. A queue is a trait of batches: any
//! number of [`submit`](Queue::submit), one [`commit`](Queue::commit), then
//! [`reap`](Queue::reap) whatever is done, with a descriptor to sleep on. Disks that are memory
//! complete inline, and pay for none of it.
//!
//! * [`NullDisk`] keeps nothing: what is measured on it is everything but the disk;
//! * [`MemDisk`] keeps its blocks in memory, for as long as the process lives;
//! * [`FileDisk`] is a raw image or a block device, through io_uring or threads;
//! * [`open`] opens any of them by what a person writes: `disk.img`, `mem:1GiB`, `null:1TiB`.
#![deny(unsafe_code)]

mod check;
mod compare;
mod error;
mod file;
mod mem;
mod null;
#[allow(unsafe_code)]
mod sys;
mod uri;

pub use check::Bounds;
pub use error::{FITS_MEMORY, OpenError};
pub use file::{Aio, Direct, FileDisk, FileOptions};
pub use mem::MemDisk;
pub use null::NullDisk;
pub use uri::{open, parse_size};

use shadowbell_memory::{DmaTable, Segments};
use std::os::fd::BorrowedFd;
use std::{fmt, io};

/// What a disk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Bytes in a logical block: 512 or 4096.
    pub block_size: u32,
    /// Logical blocks in the disk.
    pub blocks: u64,
    /// Writes are refused; the namespace is write-protected.
    pub read_only: bool,
    /// Completed writes can be lost with the power until a flush: there is a volatile write cache.
    pub volatile_cache: bool,
    /// Discarded blocks are given back to the storage below.
    pub discard: bool,
    /// Blocks to which discards and other requests are best aligned, in logical blocks; at least 1.
    pub granularity: u32,
}

impl Info {
    /// The capacity in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(u64::from(self.block_size))
    }
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Disk to data.
    Read,
    /// Data to disk; with `fua`, onto stable storage before it completes.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Everything that was completed before is on stable storage when this completes.
    Flush,
    /// The range reads as zeroes afterwards; with `deallocate` it may be given back to the storage.
    WriteZeroes {
        /// The host allows (DEAC) that the blocks are deallocated.
        deallocate: bool,
        /// Force unit access.
        fua: bool,
    },
    /// The range's content is not needed any more. It reads as zeroes afterwards on a disk with
    /// [`Info::discard`]; on one without, nothing happens.
    Discard,
    /// Succeeds if the disk holds what the data holds, else [`DiskError::CompareFailed`].
    Compare,
    /// Reads the range from the medium and throws it away.
    Verify,
}

/// One request, in bytes of the disk: both are multiples of the block size, and the range lies
/// inside the disk (the controller has checked; a queue checks again and answers
/// [`DiskError::OutOfRange`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// First byte.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
}

/// Why a request failed. A plain code, so that a completion costs no allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The range is not inside the disk (any more).
    #[error("the range is outside of the disk")]
    OutOfRange,
    /// The disk takes no writes.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The storage below is full.
    #[error("no space is left on the storage below")]
    NoSpace,
    /// The data of a Compare differ.
    #[error("the data differ from the disk's")]
    CompareFailed,
    /// The data buffer is shorter than the range, or not of the right direction: a caller's bug.
    #[error("the data buffer does not fit the request")]
    BadBuffer,
    /// The disk can not do this.
    #[error("the disk does not support the operation")]
    Unsupported,
    /// The request was cancelled before it took effect.
    #[error("the request was cancelled")]
    Cancelled,
    /// The disk is a namespace of an NVMe device, which ended the request with this status: the
    /// fifteen bits of a completion above its phase tag.
    #[error("the device below failed with NVMe status {0:#06x}")]
    Device(u16),
    /// The medium could not be read or written; the system's error number.
    #[error("the storage below failed with error {0}")]
    Io(i32),
}

/// What became of a submitted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// It is done; the data buffer was not kept.
    Done(Result<(), DiskError>),
    /// It is under way. The queue has taken the data buffer out of the caller's hands
    /// (`Segments::take`) and gives it back at [`Queue::reap`].
    Pending,
}

/// Something that keeps blocks. Shared by all threads.
pub trait Disk: Send + Sync + fmt::Debug {
    /// What the disk is.
    fn info(&self) -> Info;

    /// Opens a queue for the calling thread.
    ///
    /// # Errors
    /// The system's, when it has no more of what a queue needs.
    fn queue(&self) -> io::Result<Box<dyn Queue>>;

    /// What to call the disk in a message to a person: `disk.img`, `mem:1GiB`.
    fn name(&self) -> String;

    /// What is not as it should be with the disk, though it works: a sentence for an operator. The
    /// default has nothing to say.
    fn remark(&self) -> Option<String> {
        None
    }

    /// Whether the storage below has refused a write for want of room, and has not taken it since. Asked
    /// under locks: it must not wait for anything. The default never lacks room.
    fn is_full(&self) -> bool {
        false
    }

    /// Whether data that were written may be lost, because the system could not write them back: then
    /// every flush fails until the disk is opened again. Must not wait, either. The default loses nothing.
    fn has_lost(&self) -> bool {
        false
    }

    /// What the disk has counted of how it works, by name, for an operator. The default counts
    /// nothing.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }
}

/// One thread's way to a disk.
pub trait Queue {
    /// Starts `request` with the buffer `data` (empty for operations without data). `tag` comes
    /// back at [`reap`](Self::reap) and is the caller's own, unique among its pending requests.
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted;

    /// Whether the queue gains by [`tell`](Self::prefetch_hint).
    fn wants_prefetch_hints(&self) -> bool {
        false
    }

    /// A request to do `op`, a read or a write, with `len` bytes from byte `offset` of the disk is
    /// `ahead` requests away (2, and then 1), most likely: what it needs can be brought near. A hint,
    /// of which nothing has been checked.
    fn prefetch_hint(&self, op: Op, offset: u64, len: usize, ahead: u32) {
        let _ = (op, offset, len, ahead);
    }

    /// Hands what was submitted and is not under way yet to the system, in one call.
    fn commit(&mut self) {}

    /// Calls `done` for each request that has ended, with its buffer. Does not wait.
    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        let _ = done;
    }

    /// Asks that the pending request `tag` ends soon: as [`DiskError::Cancelled`] if that came in
    /// time, or as it would have.
    fn cancel(&mut self, tag: u32) {
        let _ = tag;
    }

    /// The host's memory is what `table` says from now on. Whatever the queue remembers of other
    /// memory, apart from the buffers of pending requests, is to be forgotten.
    fn memory_changed(&mut self, table: &DmaTable) {
        let _ = table;
    }

    /// How many requests are pending.
    fn pending(&self) -> usize {
        0
    }

    /// A descriptor that becomes readable when [`reap`](Self::reap) has something to do; `None`
    /// for a disk that never leaves a request pending. It stays readable until then.
    ///
    /// A wait that the system ends with `EINTR` counts as a wake-up, too: that is how it brings
    /// a completion to a thread that sleeps.
    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether that descriptor becomes readable again and again without ever ceasing to be, so that
    /// it has to be watched for that (`EPOLLET`).
    fn wakes_by_edges(&self) -> bool {
        false
    }
}
