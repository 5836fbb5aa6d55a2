//! Versions of the state format.

use std::ops::RangeInclusive;

/// Version of the states that this program creates.
pub const VERSION: u32 = 1;
/// Versions that this program accepts: its own and, once there is one, the previous one.
pub const READABLE: RangeInclusive<u32> = 1..=VERSION;
