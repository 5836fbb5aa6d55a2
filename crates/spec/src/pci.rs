//! PCI constants of NVMe: class code and MSI-X capability. PCIe 1.1, "PCI Header" and "PCI Express
//! capabilities"; PCI Local Bus 3.0, 6.8.2 for MSI-X.

/// Class code of an NVMe I/O controller as 24 bits: class (mass storage), subclass (non-volatile
/// memory), programming interface (NVM Express I/O controller).
pub const CLASS_CODE: u32 = 0x01_08_02;

/// Capability identifier: Power Management Interface.
pub const CAP_ID_PM: u8 = 0x01;
/// Capability identifier: PCI Express.
pub const CAP_ID_EXPRESS: u8 = 0x10;
/// Capability identifier: MSI-X.
pub const CAP_ID_MSIX: u8 = 0x11;
/// Maximum number of vectors of an MSI-X table.
pub const MSIX_MAX_VECTORS: u16 = 2048;
/// Message Control bit 15: MSI-X Enable.
pub const MSIX_ENABLE: u16 = 1 << 15;
/// Message Control bit 14: Function Mask.
pub const MSIX_FUNCTION_MASK: u16 = 1 << 14;
