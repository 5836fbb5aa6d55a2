//! Versions of the state format.

use std::ops::RangeInclusive;

/// Version of the states that this program writes.
pub const VERSION: u32 = 1;
/// Versions that this program can read: its own, and the previous one if there is one.
pub const READABLE: RangeInclusive<u32> = 1..=VERSION;
