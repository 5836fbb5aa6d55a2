//! What Get LBA Status returns: NVM 1.1, 4.2.1 "Get LBA Status command".
//!
//! An [`LbaStatusList`] and then its descriptors, in the order of their blocks.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Action Types of Get LBA Status: which blocks are told of.
pub mod atype {
    /// Return the allocated LBAs. A controller that does says so in AOCS
    /// ([`IdentifyNvmController::REPORTS_ALLOCATED`](crate::identify::IdentifyNvmController)).
    pub const ALLOCATED: u8 = 0x02;
    /// Scan for potentially unrecoverable LBAs, and return those that were known before, too.
    pub const SCAN_UNRECOVERABLE: u8 = 0x10;
    /// Return the potentially unrecoverable LBAs that are known.
    pub const UNRECOVERABLE: u8 = 0x11;
}

/// The head of an LBA Status Descriptor List.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct LbaStatusList {
    /// Number of LBA Status Descriptors that follow.
    pub nlsd: u32,
    /// Completion Condition.
    pub cmpc: u8,
    /// Reserved.
    pub reserved5: [u8; 3],
}

impl LbaStatusList {
    /// CMPC: it is not said whether there is more.
    pub const NO_INDICATION: u8 = 0;
    /// CMPC: there is no room for more, and there may be more.
    pub const INCOMPLETE: u8 = 1;
    /// CMPC: there is no more in the range.
    pub const COMPLETE: u8 = 2;
}

/// An LBA Status Descriptor: a range of blocks.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct LbaStatusDescriptor {
    /// Descriptor Starting LBA.
    pub dslba: u64,
    /// Number of Logical Blocks, 0's based.
    pub nlb0: u32,
    /// Reserved.
    pub reserved12: u8,
    /// Status: bit 0 reads may fail, bit 1 marked by Write Uncorrectable.
    pub status: u8,
    /// Reserved.
    pub reserved14: [u8; 2],
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(LbaStatusList, 8, { nlsd: 0, cmpc: 4, reserved5: 5 });
        assert_layout!(LbaStatusDescriptor, 16, {
            dslba: 0, nlb0: 8, reserved12: 12, status: 13, reserved14: 14,
        });
    }
}
