//! Positions in a queue, and the arithmetic that wraps them.

/// The number of entries of a queue: 2 to 65536 (NVMe Base 2.0, Queue Size), and not always
/// a power of two.
///
/// Positions run from 0 to size - 1, so a position always fits a `u16` and a size does not. Every
/// method takes positions that are inside the ring; with others the result is some position or
/// distance of no meaning, but never a panic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingSize(u32);

impl RingSize {
    /// The smallest queue that can hold an entry: one slot always stays empty.
    pub const MIN: u32 = 2;
    /// The largest queue that a 16-bit, zero-based QSIZE can ask for.
    pub const MAX: u32 = 65536;

    /// A ring of `entries` entries; nothing if that is not 2 to 65536.
    #[inline]
    pub const fn new(entries: u32) -> Option<Self> {
        if entries >= Self::MIN && entries <= Self::MAX { Some(Self(entries)) } else { None }
    }

    /// The ring that a zero-based size field asks for (QSIZE in Create I/O Queue, ASQS and ACQS in
    /// AQA); nothing for 0, which would be a ring of one entry.
    #[inline]
    pub const fn from_zero_based(qsize: u16) -> Option<Self> {
        Self::new(qsize as u32 + 1)
    }

    /// The number of entries.
    #[inline]
    pub const fn entries(self) -> u32 {
        self.0
    }

    /// Whether `value`, as found in a doorbell, is a position of this ring.
    #[inline]
    pub const fn position(self, value: u32) -> Option<u16> {
        if value < self.0 { Some(value as u16) } else { None }
    }

    /// How many entries lie from `from` forward to `to`: 0 to size - 1.
    #[inline]
    pub const fn distance(self, from: u16, to: u16) -> u32 {
        let (from, to) = (from as u32, to as u32);
        if to >= from { to - from } else { (to + self.0).wrapping_sub(from) }
    }

    /// The position `count` entries after `from`, for a count of at most the size.
    #[inline]
    pub const fn forward(self, from: u16, count: u32) -> u16 {
        let to = (from as u32).wrapping_add(count);
        if to >= self.0 { to.wrapping_sub(self.0) as u16 } else { to as u16 }
    }

    /// The position after `from`.
    #[inline]
    pub const fn next(self, from: u16) -> u16 {
        let to = from as u32 + 1;
        if to == self.0 { 0 } else { to as u16 }
    }

    /// The position `count` entries before `from`, for a count of at most the size.
    #[inline]
    pub const fn back(self, from: u16, count: u32) -> u16 {
        let from = from as u32;
        if from >= count {
            (from - count) as u16
        } else {
            (from + self.0).wrapping_sub(count) as u16
        }
    }
}
