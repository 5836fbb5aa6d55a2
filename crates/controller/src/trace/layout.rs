//! Where things are in a trace file.

use super::record::RECORD_BYTES;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The start of a trace file.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Header {
    /// [`MAGIC`].
    pub(super) magic: [u8; 8],
    /// [`VERSION`].
    pub(super) version: u32,
    /// Bytes of a record: 32.
    pub(super) record_bytes: u32,
    /// How many rings there are; the last one is the control plane's.
    pub(super) rings: u32,
    /// Records in a ring, a power of two.
    pub(super) capacity: u32,
    /// When the trace began, in nanoseconds since 1 January 1970, UTC.
    pub(super) started: u64,
    pub(super) reserved: [u8; 32],
}

pub(super) const MAGIC: [u8; 8] = *b"SBTRACE\x01";
pub(super) const VERSION: u32 = 1;
pub(super) const HEADER_BYTES: usize = size_of::<Header>();
/// The distance of the rings' counts.
pub(super) const COUNT_BYTES: usize = 64;
/// Where a ring may start.
pub(super) const PAGE: u64 = 4096;
/// More rings than any pool of workers has.
pub(super) const MAX_RINGS: u32 = 1024;
/// The largest file that is written, and read: a gigabyte.
pub(super) const MAX_BYTES: u64 = 1 << 30;

/// Where things are in a file; checked to fit [`MAX_BYTES`].
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

    /// Where the count of ring `index` is.
    pub(super) fn count(index: u32) -> u64 {
        HEADER_BYTES as u64 + u64::from(index) * COUNT_BYTES as u64
    }

    /// Where the records of ring `index` start.
    pub(super) fn records(self, index: u32) -> u64 {
        Self::count(self.rings).next_multiple_of(PAGE) + u64::from(index) * self.ring_bytes()
    }

    pub(super) fn ring_bytes(self) -> u64 {
        u64::from(self.capacity) * RECORD_BYTES as u64
    }

    /// The size of the file.
    pub(super) fn bytes(self) -> u64 {
        self.records(self.rings)
    }
}
