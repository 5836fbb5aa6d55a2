//! What is asked of a disk, and how it ends.

use shadowbell_spec::zns::ZoneAction;

/// What is to be done. A queue answers what it does not know with [`DiskError::Unsupported`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
    /// [`DiskInfo::discard`](crate::DiskInfo::discard); on one without, nothing happens.
    Discard,
    /// Succeeds if the disk holds what the data holds, else [`DiskError::CompareFailed`].
    Compare,
    /// Writes the second half of the data if the disk holds what the first half holds, else does
    /// nothing and fails as [`DiskError::CompareFailed`]: one step for everybody who has the
    /// storage below, in this process or elsewhere. The range is one block, and the data are twice
    /// as long. Not every queue [can](crate::Queue::compares_and_writes).
    CompareAndWrite {
        /// Force unit access.
        fua: bool,
    },
    /// Reads the range from the storage below and throws the data away.
    Verify,
    /// Data to the write pointer of the zone that begins at the offset;
    /// [`Queue::appended`](crate::Queue::appended) says where that was.
    Append {
        /// Force unit access.
        fua: bool,
    },
    /// Changes the state of the zone that begins at the offset.
    Zone {
        /// To what.
        action: ZoneAction,
        /// Of all zones that can be changed so instead.
        all: bool,
    },
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
#[non_exhaustive]
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
    /// The guard of a block is not that of its data.
    #[error("a block's guard is not that of its data")]
    GuardCheck,
    /// A block has another application tag than the one that is expected.
    #[error("a block has another application tag than the one that is expected")]
    ApplicationTagCheck,
    /// A block has another reference tag than the one that is expected.
    #[error("a block has another reference tag than the one that is expected")]
    ReferenceTagCheck,
    /// The request goes beyond what a zone has.
    #[error("the request goes beyond what the zone has")]
    ZoneBoundary,
    /// Nothing more can be written to the zone.
    #[error("the zone is full")]
    ZoneFull,
    /// The zone can only be read.
    #[error("the zone is read-only")]
    ZoneReadOnly,
    /// The zone can not be read.
    #[error("the zone is offline")]
    ZoneOffline,
    /// A write is not at the write pointer of its zone.
    #[error("the write is not at the zone's write pointer")]
    ZoneInvalidWrite,
    /// Too many zones are open or closed.
    #[error("too many zones are active")]
    TooManyActiveZones,
    /// Too many zones are open.
    #[error("too many zones are open")]
    TooManyOpenZones,
    /// The zone is in no state for that.
    #[error("the zone is in no state for that")]
    ZoneTransition,
    /// What is asked of a zone makes no sense: it does not begin there, or has no such thing.
    #[error("no zone begins there, or it has no such thing")]
    InvalidZone,
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
    /// The storage could not be read or written; the system's error number.
    #[error("the storage below failed with error {0}")]
    Io(i32),
}

/// What became of a submitted request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Submitted {
    /// It is done; the data buffer was not kept.
    Done(Result<(), DiskError>),
    /// It is under way. The queue has taken the data buffer out of the caller's hands
    /// (`Segments::take`) and gives it back at [`Queue::reap`](crate::Queue::reap).
    Pending,
}
