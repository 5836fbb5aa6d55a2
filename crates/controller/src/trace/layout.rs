//! Layout of a trace file.

use super::record::RECORD_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Header of a trace file.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Header {
    /// [`MAGIC`].
    pub(super) magic: [u8; 8],
    /// [`VERSION`].
    pub(super) version: u32,
    /// Bytes per record: 32.
    pub(super) record_bytes: u32,
    /// Number of rings; the last one is the control plane's.
    pub(super) rings: u32,
    /// Records per ring, a power of two.
    pub(super) capacity: u32,
    /// Start time in nanoseconds since 1 January 1970, UTC.
    pub(super) started: u64,
    pub(super) reserved: [u8; 32],
}

pub(super) const MAGIC: [u8; 8] = *b"SBTRACE\x01";
pub(super) const VERSION: u32 = 1;
pub(super) const HEADER_BYTES: usize = size_of::<Header>();
/// Bytes per ring count.
pub(super) const COUNT_BYTES: usize = 64;
/// Alignment of rings.
pub(super) const PAGE: u64 = 4096;
/// Maximum number of rings: more than a pool can have.
pub(super) const MAX_RINGS: u32 = 1024;
/// Maximum size of a trace file, written or read: 1 GiB.
pub(super) const MAX_BYTES: u64 = 1 << 30;

/// Layout of a file; checked to fit [`MAX_BYTES`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) rings: u32,
    pub(super) capacity: u32,
}

impl Layout {
    pub(super) fn new(rings: u32, capacity: u32) -> Option<Self> {
        let layout = Self { rings, capacity };
        let sane = (1..=MAX_RINGS).contains(&rings) && capacity >= 2 && capacity.is_power_of_two();
        (sane && layout.bytes() <= MAX_BYTES).then_some(layout)
    }

    /// Offset of the count of ring `index`.
    pub(super) fn count(index: u32) -> u64 {
        HEADER_BYTES as u64 + u64::from(index) * COUNT_BYTES as u64
    }

    /// Offset of the records of ring `index`.
    pub(super) fn records(self, index: u32) -> u64 {
        Self::count(self.rings).next_multiple_of(PAGE) + u64::from(index) * self.ring_bytes()
    }

    pub(super) fn ring_bytes(self) -> u64 {
        u64::from(self.capacity) * RECORD_BYTES as u64
    }

    /// Size of the file in bytes.
    pub(super) fn bytes(self) -> u64 {
        self.records(self.rings)
    }
}
