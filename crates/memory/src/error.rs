//! What is refused of a DMA map, and of who uses it.

use shadowbell_spec::status::Status;

/// Why a change of the DMA map was refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DmaError {
    /// The range is empty or wraps around the end of the address space.
    #[error("the IOVA range {iova:#x}+{len:#x} is empty or wraps around")]
    Range {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// Part of the range is mapped already.
    #[error("the IOVA range {iova:#x}+{len:#x} overlaps the map at {other:#x}")]
    Overlap {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
        /// First address of the map that is in the way.
        other: u64,
    },
    /// The range would split an existing map, which VFIO's rules do not allow either.
    #[error("unmapping {iova:#x}+{len:#x} would split the map at {other:#x}")]
    Split {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
        /// First address of the map that would be split.
        other: u64,
    },
    /// Nothing is mapped there.
    #[error("nothing is mapped in the IOVA range {iova:#x}+{len:#x}")]
    NotMapped {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The host memory is shorter than the range.
    #[error("{len:#x} bytes at IOVA {iova:#x} are backed by only {have:#x} bytes")]
    Short {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
        /// Length of the memory behind it, in bytes.
        have: u64,
    },
}

/// An address that the peer named and may not use: not mapped, or mapped read-only and written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("IOVA {iova:#x} is not mapped for a {}", if *.write { "write" } else { "read" })]
pub struct Fault {
    /// The first address that is not usable.
    pub iova: u64,
    /// Whether it was to be written.
    pub write: bool,
}

/// A data pointer that can not be used. [`status`](Self::status) is what the specification gives
/// the command for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DataPointerError {
    /// An address that is not mapped, or not for this direction.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// A PRP entry with an offset where none may be, or one that is not aligned to a dword (PRP 1)
    /// or a qword (the list pointer).
    #[error("PRP entry {0:#x} has an invalid offset")]
    PrpOffset(u64),
    /// An SGL segment descriptor where none may be, or with a length that holds no descriptor.
    #[error("invalid SGL segment descriptor")]
    SglSegment,
    /// More descriptors than the controller takes, or a Last Segment that is none.
    #[error("invalid number of SGL descriptors")]
    SglCount,
    /// The descriptors hold less data than the command moves.
    #[error("the SGL is shorter than the data")]
    SglLength,
    /// A descriptor of a type or sub type that this controller does not support here.
    #[error("SGL descriptor type {0:#04x} is not supported")]
    SglType(u8),
}

impl DataPointerError {
    /// The status that the command ends in.
    #[must_use]
    pub fn status(&self) -> Status {
        match self {
            Self::Fault(_) => Status::DATA_XFER_ERROR,
            Self::PrpOffset(_) => Status::PRP_OFFSET_INVALID.with_dnr(),
            Self::SglSegment => Status::SGL_INVALID_SEGMENT_DESCRIPTOR.with_dnr(),
            Self::SglCount => Status::SGL_INVALID_NUMBER_OF_DESCRIPTORS.with_dnr(),
            Self::SglLength => Status::SGL_DATA_LENGTH_INVALID.with_dnr(),
            Self::SglType(_) => Status::SGL_DESCRIPTOR_TYPE_INVALID.with_dnr(),
        }
    }
}
