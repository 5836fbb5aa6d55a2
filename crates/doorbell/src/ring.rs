//! Positions in a queue, and arithmetic modulo its size.

use core::fmt;

/// Invalid doorbell value: outside of the ring, or a completion queue head that consumes more
/// entries than were posted.
///
/// The controller reports the asynchronous event Invalid Doorbell Write Value (type Error Status,
/// 01h; NVMe Base 2.0, 5.2) and ignores the value. After an invalid submission queue tail, it takes
/// no command from the queue until the queue is created again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidDoorbell {
    /// The invalid value.
    pub value: u32,
}

impl fmt::Display for InvalidDoorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid doorbell value {:#x}", self.value)
    }
}

impl core::error::Error for InvalidDoorbell {}

/// Number of entries of a queue: 2 to 65536 (NVMe Base 2.0, Queue Size), not necessarily a power of
/// two.
///
/// Positions are 0 to size - 1, so every position fits into a `u16`, but the size 65536 does not.
/// All methods expect positions inside of the ring. With other positions, the result is
/// meaningless, but no method panics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RingSize(u32);

impl RingSize {
    /// Smallest queue that can hold an entry, because one slot always stays empty.
    pub const MIN: u32 = 2;
    /// Largest queue that a 16-bit, zero-based QSIZE can express.
    pub const MAX: u32 = 65536;

    /// Creates a ring of `entries` entries; `None` if that is not 2 to 65536.
    #[inline]
    pub const fn new(entries: u32) -> Option<Self> {
        if entries >= Self::MIN && entries <= Self::MAX { Some(Self(entries)) } else { None }
    }

    /// Ring of a zero-based size field (QSIZE in Create I/O Queue, ASQS and ACQS in AQA). `None`
    /// for 0, because that is a ring of one entry.
    #[inline]
    pub const fn from_zero_based(qsize: u16) -> Option<Self> {
        Self::new(qsize as u32 + 1)
    }

    /// Number of entries.
    #[inline]
    pub const fn entries(self) -> u32 {
        self.0
    }

    /// Converts a doorbell value to a position; `None` if it is outside of the ring.
    #[inline]
    pub const fn position(self, value: u32) -> Option<u16> {
        if value < self.0 { Some(value as u16) } else { None }
    }

    /// Validates a doorbell value: returns its position if that is inside of the ring and at most
    /// `limit` entries after `last`, the last valid position.
    ///
    /// # Errors
    ///
    /// The value is invalid.
    #[inline]
    pub const fn validate(self, last: u16, value: u32, limit: u32) -> Result<u16, InvalidDoorbell> {
        match self.position(value) {
            Some(seen) if self.distance(last, seen) <= limit => Ok(seen),
            _ => Err(InvalidDoorbell { value }),
        }
    }

    /// Number of entries from `from` forward to `to`: 0 to size - 1.
    #[inline]
    pub const fn distance(self, from: u16, to: u16) -> u32 {
        let (from, to) = (from as u32, to as u32);
        if to >= from { to - from } else { (to + self.0).wrapping_sub(from) }
    }

    /// Position `count` entries after `from`. `count` is at most the size.
    #[inline]
    pub const fn forward(self, from: u16, count: u32) -> u16 {
        let to = (from as u32).wrapping_add(count);
        if to >= self.0 { to.wrapping_sub(self.0) as u16 } else { to as u16 }
    }

    /// Position after `from`.
    #[inline]
    pub const fn next(self, from: u16) -> u16 {
        let to = from as u32 + 1;
        if to == self.0 { 0 } else { to as u16 }
    }

    /// Position `count` entries before `from`. `count` is at most the size.
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
