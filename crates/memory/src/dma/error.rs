//! What is refused of a DMA map, and of who uses it.

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
