//! The doorbell trace: every decision about a doorbell, one by one.
//!
//! A trace is a file of rings, one for each worker and one for the control plane, which their
//! owners write through a shared mapping: a record costs the clock, a copy of 32 bytes and a store,
//! no system call, and what was recorded survives a crash of the process. When a ring is full its
//! oldest records give way. [`read_trace`] merges the rings by time, while they are being written
//! too.
//!
//! # The file
//!
//! All numbers are little-endian.
//!
//! | offset | what |
//! |---|---|
//! | 0 | [`Header`]: what the rest is |
//! | 64 + 64 r | how many records were ever written to ring r (each count in a line of its own, so that two workers never share one) |
//! | the next multiple of 4096 | the rings, one after the other, of records of 32 bytes |

mod file;
mod reader;
mod record;

pub use file::{TraceFile, TraceRing};
pub use reader::{TraceError, read_trace};
pub use record::{COMPLETION_QUEUE, Kind, Record};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The start of a trace file.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct Header {
    /// [`MAGIC`].
    magic: [u8; 8],
    /// [`VERSION`].
    version: u32,
    /// Bytes of a record: 32.
    record_bytes: u32,
    /// How many rings there are; the last one is the control plane's.
    rings: u32,
    /// Records in a ring, a power of two.
    capacity: u32,
    /// When the trace began, in nanoseconds since 1 January 1970, UTC.
    started: u64,
    reserved: [u8; 32],
}

const MAGIC: [u8; 8] = *b"SBTRACE\x01";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = size_of::<Header>();
/// The distance of the rings' counts.
const COUNT_BYTES: usize = 64;
/// Where a ring may start.
const PAGE: u64 = 4096;
/// More rings than any pool of workers has.
const MAX_RINGS: u32 = 1024;
/// The largest file that is written, and read: a gigabyte.
const MAX_BYTES: u64 = 1 << 30;

/// Where things are in a file; checked to fit [`MAX_BYTES`].
#[derive(Clone, Copy, Debug)]
struct Layout {
    rings: u32,
    capacity: u32,
}

impl Layout {
    fn new(rings: u32, capacity: u32) -> Option<Self> {
        let layout = Self { rings, capacity };
        let sane = (1..=MAX_RINGS).contains(&rings) && capacity >= 2 && capacity.is_power_of_two();
        (sane && layout.bytes() <= MAX_BYTES).then_some(layout)
    }

    /// Where the count of ring `index` is.
    fn count(index: u32) -> u64 {
        HEADER_BYTES as u64 + u64::from(index) * COUNT_BYTES as u64
    }

    /// Where the records of ring `index` start.
    fn records(self, index: u32) -> u64 {
        Self::count(self.rings).next_multiple_of(PAGE) + u64::from(index) * self.ring_bytes()
    }

    fn ring_bytes(self) -> u64 {
        u64::from(self.capacity) * record::RECORD_BYTES as u64
    }

    /// The size of the file.
    fn bytes(self) -> u64 {
        self.records(self.rings)
    }
}

#[cfg(test)]
mod tests;
