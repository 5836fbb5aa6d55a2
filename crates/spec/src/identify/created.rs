//! Data of Namespace Management (Create).

use super::{Dps, Flbas, Nmic};
use crate::layout::zero_default;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Data of Namespace Management (Create) of the NVM command set: the fields of
/// [`IdentifyNamespace`](super::IdentifyNamespace) that a host can set, at the same offsets. Base
/// 2.1, 5.1.21, "Namespace Management - Host Software Specified Fields"; NVM 1.1, 4.1.6.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct NamespaceToCreate {
    /// Namespace Size in logical blocks.
    pub nsze: u64,
    /// Namespace Capacity in logical blocks.
    pub ncap: u64,
    /// Reserved.
    pub reserved16: [u8; 10],
    /// Formatted LBA Size.
    pub flbas: Flbas,
    /// Reserved.
    pub reserved27: [u8; 2],
    /// End-to-end Data Protection Type Settings.
    pub dps: Dps,
    /// Namespace Multi-path I/O and Namespace Sharing Capabilities.
    pub nmic: Nmic,
    /// Reserved.
    pub reserved31: [u8; 61],
    /// ANA Group Identifier; 0 to let the controller choose.
    pub anagrpid: u32,
    /// Reserved.
    pub reserved96: [u8; 4],
    /// NVM Set Identifier; 0 to let the controller choose.
    pub nvmsetid: u16,
    /// Endurance Group Identifier; 0 to let the controller choose.
    pub endgid: u16,
    /// Reserved.
    pub reserved104: [u8; 280],
    /// Logical Block Storage Tag Mask.
    pub lbstm: [u8; 8],
    /// Number of Placement Handles, and the other fields of Flexible Data Placement.
    pub placement: [u8; 120],
    /// Reserved, and Vendor Specific from byte 1024 on.
    pub reserved512: [u8; 3584],
}

zero_default!(NamespaceToCreate);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(NamespaceToCreate, 4096, {
            nsze: 0, ncap: 8, reserved16: 16, flbas: 26, reserved27: 27, dps: 29, nmic: 30,
            reserved31: 31, anagrpid: 92, reserved96: 96, nvmsetid: 100, endgid: 102,
            reserved104: 104, lbstm: 384, placement: 392, reserved512: 512,
        });
    }
}
