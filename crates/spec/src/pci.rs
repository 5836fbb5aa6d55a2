//! PCI constants of NVMe: class code, BARs, capabilities, MSI-X table. PCIe 1.1, "PCI Header" and
//! "PCI Express capabilities"; PCI Local Bus 3.0, 6.8.2 for MSI-X.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Base class: mass storage controller.
pub const CLASS_MASS_STORAGE: u8 = 0x01;
/// Subclass: non-volatile memory controller.
pub const SUBCLASS_NVM: u8 = 0x08;
/// Programming interface: NVM Express I/O controller.
pub const PROG_IF_NVME: u8 = 0x02;
/// Programming interface: NVM Express administrative controller.
pub const PROG_IF_NVME_ADMIN: u8 = 0x03;
/// Class code of an NVMe I/O controller as 24 bits: class, subclass, programming interface.
pub const CLASS_CODE: u32 = 0x01_08_02;

/// BAR of the controller properties and doorbells. It is 64 bits wide, so BAR1 is a part of it.
pub const PROPERTIES_BAR: u8 = 0;

/// Capability identifier: Power Management Interface.
pub const CAP_ID_PM: u8 = 0x01;
/// Capability identifier: Message Signalled Interrupts.
pub const CAP_ID_MSI: u8 = 0x05;
/// Capability identifier: PCI Express.
pub const CAP_ID_EXPRESS: u8 = 0x10;
/// Capability identifier: MSI-X.
pub const CAP_ID_MSIX: u8 = 0x11;

/// MSI-X table entry, in memory layout.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct MsixEntry {
    /// Message address, low half.
    pub address_low: u32,
    /// Message address, high half.
    pub address_high: u32,
    /// Message data.
    pub data: u32,
    /// Vector control: see [`MSIX_MASKED`].
    pub control: u32,
}

/// [`MsixEntry::control`] bit: the vector is masked. After a reset, this bit is set.
pub const MSIX_MASKED: u32 = 1;
/// Size of an MSI-X table entry in bytes.
pub const MSIX_ENTRY_SIZE: usize = 16;
/// Maximum number of vectors of an MSI-X table.
pub const MSIX_MAX_VECTORS: u16 = 2048;
/// Message Control bit 15: MSI-X Enable.
pub const MSIX_ENABLE: u16 = 1 << 15;
/// Message Control bit 14: Function Mask.
pub const MSIX_FUNCTION_MASK: u16 = 1 << 14;
/// Message Control bits 10:0: Table Size, 0's based.
pub const MSIX_TABLE_SIZE: u16 = 0x7ff;

/// Size in bytes of the MSI-X pending bit array for `vectors` vectors: one bit for each, in 8-byte
/// words.
pub const fn msix_pba_size(vectors: u16) -> u64 {
    (vectors as u64).div_ceil(64) * 8
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::{offset_of, size_of};

    #[test]
    fn layout() {
        assert_eq!(size_of::<MsixEntry>(), MSIX_ENTRY_SIZE);
        assert_eq!(offset_of!(MsixEntry, address_low), 0);
        assert_eq!(offset_of!(MsixEntry, address_high), 4);
        assert_eq!(offset_of!(MsixEntry, data), 8);
        assert_eq!(offset_of!(MsixEntry, control), 12);
        assert_eq!(CLASS_CODE.to_be_bytes(), [0, CLASS_MASS_STORAGE, SUBCLASS_NVM, PROG_IF_NVME]);
    }

    #[test]
    fn pending_bits() {
        assert_eq!(msix_pba_size(1), 8);
        assert_eq!(msix_pba_size(64), 8);
        assert_eq!(msix_pba_size(65), 16);
        assert_eq!(msix_pba_size(MSIX_MAX_VECTORS), 256);
    }
}
