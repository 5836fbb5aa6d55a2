//! Versions of the state format.

use std::ops::RangeInclusive;

/// Version of the states that this program writes. Until the first release is published, fields may
/// change without a new version: no program with other fields is in use.
pub const VERSION: u32 = 1;
/// Versions that this program can read: its own, and the previous one if there is one.
pub const READABLE: RangeInclusive<u32> = 1..=VERSION;
