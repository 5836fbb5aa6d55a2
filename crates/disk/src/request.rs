//! Disk requests and their results.

use shadowbell_spec::zns::ZoneAction;

/// Operation of a request. A queue completes unknown operations with [`DiskError::Unsupported`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads from the disk into the data buffer.
    Read,
    /// Writes the data buffer to the disk. With `fua`, the data are on stable storage before
    /// completion.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Makes all requests durable that completed before the flush was submitted.
    Flush,
    /// Zeroes the range. With `deallocate`, the blocks may be returned to the storage.
    WriteZeroes {
        /// Deallocation of the blocks is allowed (DEAC).
        deallocate: bool,
        /// Force unit access.
        fua: bool,
    },
    /// Discards the content of the range. The range reads as zeroes afterwards on a disk with
    /// [`DiskInfo::discard`](crate::DiskInfo::discard); other disks ignore the request.
    Discard,
    /// Compares the range with the data buffer; a mismatch is [`DiskError::CompareFailed`].
    Compare,
    /// Compares the range with the first half of the data. If they are equal, writes the second
    /// half; otherwise fails with [`DiskError::CompareFailed`]. Comparison and write are atomic for
    /// all users of the storage, in this process or elsewhere. The range is one block, and the data
    /// are two blocks. Not every queue [supports it](crate::Queue::compares_and_writes).
    CompareAndWrite {
        /// Force unit access.
        fua: bool,
    },
    /// Reads the range from the storage and discards the data.
    Verify,
    /// Writes the data at the write pointer of the zone that starts at the offset;
    /// [`Queue::appended`](crate::Queue::appended) returns the position.
    Append {
        /// Force unit access.
        fua: bool,
    },
    /// Changes the state of the zone that starts at the offset.
    Zone {
        /// Zone Send Action (ZSA) of Zone Management Send.
        action: ZoneAction,
        /// Select All: the action applies to all zones whose state permits it, and the offset is
        /// ignored.
        all: bool,
    },
}

/// Request to a disk. Offset and length are in bytes and multiples of the block size. The
/// controller has checked that the range lies inside the disk. A queue checks it again, because the
/// disk may have become smaller, and fails with [`DiskError::OutOfRange`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Operation.
    pub op: Op,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes; 0 for a flush.
    pub len: u64,
}

/// Error of a failed request. Carries no text, so that a completion allocates no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The range is not inside the disk, whose size may have changed.
    #[error("the range is outside of the disk")]
    OutOfRange,
    /// The disk is read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The storage is full.
    #[error("no space is left on the storage below")]
    NoSpace,
    /// The data of a Compare differ from the disk's.
    #[error("the data differ from the disk's")]
    CompareFailed,
    /// The guard of a block does not match its data.
    #[error("a block's guard does not match its data")]
    GuardCheck,
    /// The application tag of a block differs from the expected one.
    #[error("a block has an unexpected application tag")]
    ApplicationTagCheck,
    /// The reference tag of a block differs from the expected one.
    #[error("a block has an unexpected reference tag")]
    ReferenceTagCheck,
    /// The request crosses the end of the zone or its capacity.
    #[error("the request crosses the end of the zone or of its capacity")]
    ZoneBoundary,
    /// The zone is full.
    #[error("the zone is full")]
    ZoneFull,
    /// The zone is read-only.
    #[error("the zone is read-only")]
    ZoneReadOnly,
    /// The zone is offline.
    #[error("the zone is offline")]
    ZoneOffline,
    /// The write does not start at the write pointer of its zone.
    #[error("the write is not at the zone's write pointer")]
    ZoneInvalidWrite,
    /// Too many zones would be active (open or closed).
    #[error("too many zones are active")]
    TooManyActiveZones,
    /// Too many zones would be open.
    #[error("too many zones are open")]
    TooManyOpenZones,
    /// The zone's state does not allow the action.
    #[error("the zone's state does not allow the action")]
    ZoneTransition,
    /// The zone request is invalid: no zone starts at the offset, or the zone lacks the feature.
    #[error("no zone starts there, or the zone lacks the feature")]
    InvalidZone,
    /// Bug of the caller: the data buffer is shorter than the range, or has the wrong direction.
    #[error("the data buffer does not fit the request")]
    BadBuffer,
    /// The disk does not support the operation.
    #[error("the disk does not support the operation")]
    Unsupported,
    /// The request was cancelled. A cancelled write may still be in flight at the storage, as an
    /// [orphan](crate::Orphans). A cancelled write that is no orphan is not executed any more.
    #[error("the request was cancelled")]
    Cancelled,
    /// NVMe status with which the device below failed the request: the fifteen bits of a completion
    /// above its phase tag.
    #[error("the device below failed with NVMe status {0:#06x}")]
    Device(u16),
    /// System error number of a failed access to the storage.
    #[error("the storage below failed with error {0}")]
    Io(i32),
}

/// State of a request after its submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// Completed; the queue did not keep the data buffer.
    Done(Result<(), DiskError>),
    /// In flight. The queue has taken the data buffer (`Segments::take`) and returns it at
    /// [`Queue::reap`](crate::Queue::reap).
    Pending,
}
