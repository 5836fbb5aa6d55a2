//! Log pages Telemetry Host-Initiated, 07h, and Telemetry Controller-Initiated, 08h. Base 2.1,
//! 5.1.12.1.8 and 5.1.12.1.9.

use crate::layout::zero_default;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size of the header and of each data block in bytes.
pub const TELEMETRY_BLOCK: usize = 512;

/// Header of both log pages. Data blocks follow, which are counted from 1. All three data areas
/// start at block 1, so Data Area 3 contains Data Areas 1 and 2.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct TelemetryHeader {
    /// Log Page Identifier.
    pub lid: u8,
    /// Reserved.
    pub reserved1: [u8; 4],
    /// IEEE OUI Identifier; 0 for none.
    pub ieee: [u8; 3],
    /// Last blocks of Data Areas 1 to 3; 0 for an empty area.
    pub last_blocks: [U16; 3],
    /// Reserved.
    pub reserved14: [u8; 2],
    /// Last block of Data Area 4.
    pub last_block_4: U32,
    /// Reserved.
    pub reserved20: [u8; 360],
    /// Scope in the page Host-Initiated: 1 for the controller, 2 for the subsystem. Reserved in the
    /// page Controller-Initiated.
    pub host_scope: u8,
    /// Data Generation Number in the page Host-Initiated; scope in the page Controller-Initiated.
    pub host_generation: u8,
    /// Controller-Initiated Data Available.
    pub controller_available: u8,
    /// Controller-Initiated Data Generation Number.
    pub controller_generation: u8,
    /// Reason Identifier: specific to the vendor.
    pub reason: [u8; 128],
}

zero_default!(TelemetryHeader);

impl TelemetryHeader {
    /// Scope: the controller.
    pub const CONTROLLER: u8 = 1;

    /// Number of data blocks of Data Area 3, which contains Data Areas 1 and 2.
    pub fn blocks(&self) -> usize {
        usize::from(self.last_blocks[2].get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(TelemetryHeader, 512, {
            lid: 0, reserved1: 1, ieee: 5, last_blocks: 8, reserved14: 14, last_block_4: 16,
            reserved20: 20, host_scope: 380, host_generation: 381, controller_available: 382,
            controller_generation: 383, reason: 384,
        });
    }
}
