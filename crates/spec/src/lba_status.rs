//! Data of Get LBA Status (NVM 1.1, 4.2.1 "Get LBA Status command"), and the log page LBA Status
//! Information (4.1.4.5).
//!
//! The command returns an [`LbaStatusList`] and its descriptors, in the order of their blocks. The
//! log page is an [`LbaStatusLog`], and for each namespace an [`LbaStatusElement`] with its
//! [`LbaRange`]s.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Action Types of Get LBA Status, which select the reported blocks.
pub mod atype {
    /// Report the allocated LBAs. The controller announces support in AOCS
    /// ([`IdentifyNvmController::REPORTS_ALLOCATED`](crate::identify::IdentifyNvmController)).
    pub const ALLOCATED: u8 = 0x02;
    /// Scan for potentially unrecoverable LBAs. Report the LBAs that the scan finds and those
    /// already known.
    pub const SCAN_UNRECOVERABLE: u8 = 0x10;
    /// Report the known potentially unrecoverable LBAs.
    pub const UNRECOVERABLE: u8 = 0x11;
}

/// Head of an LBA Status Descriptor List.
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
    /// CMPC: the list may be complete or incomplete.
    pub const NO_INDICATION: u8 = 0;
    /// CMPC: the buffer is full, and there may be more.
    pub const INCOMPLETE: u8 = 1;
    /// CMPC: the list covers the whole range.
    pub const COMPLETE: u8 = 2;
}

/// LBA Status Descriptor: a range of blocks.
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

impl LbaStatusDescriptor {
    /// Status: reads of the blocks may fail.
    pub const READS_MAY_FAIL: u8 = 1 << 0;
    /// Status: the blocks were marked by Write Uncorrectable.
    pub const WRITE_UNCORRECTABLE: u8 = 1 << 1;
}

/// Head of the log page LBA Status Information, 0Eh.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct LbaStatusLog {
    /// LBA Status Log Page Length in bytes, including this head.
    pub lslplen: u32,
    /// Number of LBA Status Log Namespace Elements that follow.
    pub nlslne: u32,
    /// Estimate of Unrecoverable Logical Blocks in all elements.
    pub estulb: u32,
    /// Reserved.
    pub reserved12: [u8; 2],
    /// LBA Status Generation Counter.
    pub lsgc: u16,
}

/// Head of an LBA Status Log Namespace Element.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct LbaStatusElement {
    /// Namespace Element Identifier: the NSID.
    pub neid: u32,
    /// Number of LBA Range Descriptors that follow.
    pub nlrd: u32,
    /// Recommended Action Type, one of [`atype`].
    pub ratype: u8,
    /// Reserved.
    pub reserved9: [u8; 7],
}

/// LBA Range Descriptor.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct LbaRange {
    /// Range Starting LBA.
    pub rslba: u64,
    /// Range Number of Logical Blocks, 0's based.
    pub rnlb0: u32,
    /// Reserved.
    pub reserved12: [u8; 4],
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
        assert_layout!(LbaStatusLog, 16, {
            lslplen: 0, nlslne: 4, estulb: 8, reserved12: 12, lsgc: 14,
        });
        assert_layout!(LbaStatusElement, 16, { neid: 0, nlrd: 4, ratype: 8, reserved9: 9 });
        assert_layout!(LbaRange, 16, { rslba: 0, rnlb0: 8, reserved12: 12 });
    }
}
