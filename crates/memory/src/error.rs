//! Errors of DMA map changes, address translations and data pointers.

use shadowbell_spec::status::Status;

/// Reason for the refusal of a change of the DMA map.
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
    /// Part of the range is already mapped.
    #[error("the IOVA range {iova:#x}+{len:#x} overlaps the map at {other:#x}")]
    Overlap {
        /// First address.
        iova: u64,
        /// Length in bytes.
        len: u64,
        /// First address of the existing map.
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
    /// No map lies in the range.
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
        /// Length of the host memory in bytes.
        have: u64,
    },
}

/// Access of the peer to an address that is not mapped, or write of the peer to a read-only map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("IOVA {iova:#x} is not mapped for a {}", if *.write { "write" } else { "read" })]
pub struct Fault {
    /// First address that is not accessible.
    pub iova: u64,
    /// True for a write access.
    pub write: bool,
}

/// Reason for the refusal of a data pointer. [`status`](Self::status) is the status code that the
/// NVMe specification assigns to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DataPointerError {
    /// An address is not mapped, or its map does not allow the direction of the transfer.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// A PRP entry has an offset although its position does not allow one, or the entry is not
    /// aligned to a dword (PRP 1) or a qword (the list pointer).
    #[error("PRP entry {0:#x} has an invalid offset")]
    PrpOffset(u64),
    /// An SGL segment descriptor is in a position that does not allow it, or its length is too
    /// small for a descriptor.
    #[error("invalid SGL segment descriptor")]
    SglSegment,
    /// More descriptors than the controller supports, or an invalid Last Segment descriptor.
    #[error("invalid number of SGL descriptors")]
    SglCount,
    /// The descriptors hold less data than the command transfers.
    #[error("the SGL is shorter than the data")]
    SglLength,
    /// The type or sub type of a descriptor is not supported in this place.
    #[error("SGL descriptor type {0:#04x} is not supported")]
    SglType(u8),
}

impl DataPointerError {
    /// Status with which the command completes.
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
