//! Versions of states.

use std::ops::RangeInclusive;

/// The version of the states that are made here.
pub const VERSION: u32 = 1;
/// The versions that can be read here: this one and the one before, once there is one.
pub const READABLE: RangeInclusive<u32> = 1..=VERSION;
