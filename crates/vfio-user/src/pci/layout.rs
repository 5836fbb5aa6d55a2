//! Registers of the configuration space: offsets, power-on values, and writable bits.

/// Size of the configuration space in bytes (PCI Express Base Specification, 7.2).
pub const CONFIG_SIZE: usize = 4096;

/// Offsets in the type 0 header (PCI Express Base Specification, 7.5.1).
pub(super) mod offset {
    pub(crate) const VENDOR: usize = 0x00;
    pub(crate) const DEVICE: usize = 0x02;
    pub(crate) const COMMAND: usize = 0x04;
    pub(crate) const STATUS: usize = 0x06;
    pub(crate) const REVISION: usize = 0x08;
    pub(crate) const CLASS: usize = 0x09;
    pub(crate) const CACHE_LINE: usize = 0x0c;
    pub(crate) const BAR0: usize = 0x10;
    pub(crate) const SUBSYSTEM_VENDOR: usize = 0x2c;
    pub(crate) const SUBSYSTEM: usize = 0x2e;
    pub(crate) const CAPABILITIES: usize = 0x34;
    pub(crate) const INTERRUPT_LINE: usize = 0x3c;
    pub(crate) const INTERRUPT_PIN: usize = 0x3d;
    pub(crate) const EXTENDED: usize = 0x100;
}

/// Bits of the command register (PCI Express Base Specification, 7.5.1.1.3).
pub(super) mod command {
    pub(crate) const MEMORY: u16 = 1 << 1;
    pub(crate) const BUS_MASTER: u16 = 1 << 2;
    pub(crate) const PARITY: u16 = 1 << 6;
    pub(crate) const SERR: u16 = 1 << 8;
    pub(crate) const INTX_DISABLE: u16 = 1 << 10;
}

/// Bit Interrupt Status of the status register: the function has a pending interrupt for its pin
/// (PCI Express Base Specification, 7.5.1.1.4).
pub(super) const INTERRUPT_STATUS: u16 = 1 << 3;
/// Bit Capabilities List of the status register: a capability list is present.
const CAPABILITIES_LIST: u16 = 1 << 4;

/// Power Management capability (PCI Express Base Specification, 7.5.2).
pub(super) mod pm_cap {
    pub(crate) const AT: usize = 0x40;
    pub(crate) const ID: u8 = 0x01;
    pub(crate) const CAPABILITIES: usize = AT + 2;
    pub(crate) const CONTROL: usize = AT + 4;
    /// Power Management Capabilities: version 3, without the states D1 and D2 and without power
    /// management events.
    pub(crate) const VERSION: u16 = 3;
    pub(crate) const POWER_STATE: u16 = 0b11;
    pub(crate) const NO_SOFT_RESET: u16 = 1 << 3;
}

/// MSI-X capability (PCI Express Base Specification, 7.7.2).
pub(super) mod msix_cap {
    pub(crate) const AT: usize = 0x50;
    pub(crate) const ID: u8 = 0x11;
    pub(crate) const CONTROL: usize = AT + 2;
    pub(crate) const TABLE: usize = AT + 4;
    pub(crate) const PBA: usize = AT + 8;
    pub(crate) const FUNCTION_MASK: u16 = 1 << 14;
    pub(crate) const ENABLE: u16 = 1 << 15;
}

/// PCI Express capability (PCI Express Base Specification, 7.5.3).
pub(super) mod pcie_cap {
    pub(crate) const AT: usize = 0x60;
    pub(crate) const ID: u8 = 0x10;
    pub(crate) const CAPABILITIES: usize = AT + 2;
    pub(crate) const DEVICE_CAPABILITIES: usize = AT + 0x04;
    pub(crate) const DEVICE_CONTROL: usize = AT + 0x08;
    pub(crate) const LINK_CAPABILITIES: usize = AT + 0x0c;
    pub(crate) const LINK_CONTROL: usize = AT + 0x10;
    pub(crate) const LINK_STATUS: usize = AT + 0x12;
    pub(crate) const DEVICE_CAPABILITIES_2: usize = AT + 0x24;
    pub(crate) const DEVICE_CONTROL_2: usize = AT + 0x28;
    pub(crate) const LINK_CAPABILITIES_2: usize = AT + 0x2c;
    pub(crate) const LINK_CONTROL_2: usize = AT + 0x30;
    /// PCI Express Capabilities: version 2, endpoint, no slot, interrupt message 0.
    pub(crate) const VERSION_ENDPOINT: u16 = 2;
    /// Device Capabilities: maximum payload size of 512 bytes.
    pub(crate) const MAX_PAYLOAD_512: u32 = 2;
    pub(crate) const EXTENDED_TAG: u32 = 1 << 5;
    pub(crate) const ROLE_BASED_ERRORS: u32 = 1 << 15;
    pub(crate) const FLR_CAPABLE: u32 = 1 << 28;
    pub(crate) const INITIATE_FLR: u16 = 1 << 15;
    /// Writable bits of Device Control: error enables, relaxed ordering, payload size, extended
    /// tags, no snoop, request size, and Initiate Function Level Reset. Phantom functions and
    /// auxiliary power are not writable.
    pub(crate) const DEVICE_CONTROL_BITS: u16 = 0xf9ff;
    /// Power-on value of Device Control: relaxed ordering, no snoop, requests of 512 bytes.
    pub(crate) const DEVICE_CONTROL_DEFAULT: u16 = 1 << 4 | 1 << 11 | 0b010 << 12;
    /// Link speed and width: 8 GT/s and four lanes, like a typical SSD.
    pub(crate) const SPEED_AND_WIDTH: u16 = 3 | 4 << 4;
    /// Writable bits of Link Control: ASPM control, read completion boundary, common clock,
    /// extended synch.
    pub(crate) const LINK_CONTROL_BITS: u16 = 0b11 | 1 << 3 | 1 << 6 | 1 << 7;
    /// Device Capabilities 2: completion timeouts can be disabled.
    pub(crate) const TIMEOUT_DISABLE: u16 = 1 << 4;
    /// Supported link speeds: 2.5, 5 and 8 GT/s.
    pub(crate) const SPEEDS: u32 = 0b111 << 1;
    /// Target link speed: 8 GT/s.
    pub(crate) const TARGET_SPEED: u16 = 3;
}

/// Header of the Device Serial Number capability (PCI Express Base Specification, 7.9.3):
/// identifier 3, version 1, last in the list.
const SERIAL_NUMBER: u32 = 0x0003 | 1 << 16;

/// Type bits of a base address register: 64-bit memory (PCI Express Base Specification, 7.5.1.2.1).
const BAR_MEMORY_64: u32 = 0b100;
const BAR_PREFETCHABLE: u32 = 1 << 3;

/// Identity and structures of a PCI function.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Function {
    /// Vendor identifier.
    pub vendor: u16,
    /// Device identifier.
    pub device: u16,
    /// Subsystem vendor identifier.
    pub subsystem_vendor: u16,
    /// Subsystem identifier.
    pub subsystem: u16,
    /// Revision.
    pub revision: u8,
    /// Class, subclass and programming interface: 24 bits, for example 010802h.
    pub class: u32,
    /// Base address registers.
    pub bars: Vec<Bar>,
    /// MSI-X structures, if present.
    pub msix: Option<Msix>,
    /// True if the function has an interrupt pin (INTA).
    pub interrupt_pin: bool,
    /// Serial number (EUI-64), if present.
    pub serial: Option<u64>,
}

/// Base address register for 64-bit memory, which takes two of the six registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bar {
    /// Index: 0, 2 or 4.
    pub index: u8,
    /// Size in bytes: a power of two, at least 4096.
    pub size: u64,
    /// True if reads have no side effects.
    pub prefetchable: bool,
}

/// Position of the MSI-X structures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Msix {
    /// Number of vectors: 1 to 2048.
    pub vectors: u16,
    /// Table: base address register, and offset in its region (a multiple of 8).
    pub table: (u8, u32),
    /// Pending bits: base address register, and offset in its region (a multiple of 8).
    pub pba: (u8, u32),
}

impl Msix {
    /// Size of the table in bytes.
    pub fn table_len(&self) -> u64 {
        u64::from(self.vectors) * 16
    }

    /// Size of the pending bits in bytes, rounded up to quadwords.
    pub fn pba_len(&self) -> u64 {
        u64::from(self.vectors).div_ceil(64) * 8
    }
}

/// Error of an invalid [`Function`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FunctionError {
    /// A base address register has an invalid index for a 64-bit register, or a duplicate index.
    #[error("base address register {0} is not 0, 2 or 4, or is a duplicate")]
    BarIndex(u8),
    /// A base address register has an invalid size.
    #[error("base address register {0} has a size that is not a power of two of at least 4096")]
    BarSize(u8),
    /// The number of vectors is invalid.
    #[error("{0} MSI-X vectors are not between 1 and 2048")]
    Vectors(u16),
    /// The MSI-X structures are misaligned, outside of their region, or overlap.
    #[error(
        "the MSI-X table or its pending bits are not aligned, not inside of their region, or overlap"
    )]
    MsixLocation,
    /// The class has more than 24 bits.
    #[error("class {0:#x} has more than 24 bits")]
    Class(u32),
}

type Bytes = Box<[u8; CONFIG_SIZE]>;

/// Builds the power-on values and the writable bits of the configuration space.
pub(super) fn build(function: &Function) -> Result<(Bytes, Bytes), FunctionError> {
    check(function)?;
    let mut build = Builder { bytes: Box::new([0; CONFIG_SIZE]), mask: Box::new([0; CONFIG_SIZE]) };
    build.header(function);
    build.capabilities(function);
    Ok((build.bytes, build.mask))
}

fn check(function: &Function) -> Result<(), FunctionError> {
    if function.class >> 24 != 0 {
        return Err(FunctionError::Class(function.class));
    }
    for (n, bar) in function.bars.iter().enumerate() {
        let twice = function.bars.iter().take(n).any(|other| other.index == bar.index);
        if !matches!(bar.index, 0 | 2 | 4) || twice {
            return Err(FunctionError::BarIndex(bar.index));
        }
        if !bar.size.is_power_of_two() || bar.size < 4096 {
            return Err(FunctionError::BarSize(bar.index));
        }
    }
    let Some(msix) = function.msix else { return Ok(()) };
    if !(1..=2048).contains(&msix.vectors) {
        return Err(FunctionError::Vectors(msix.vectors));
    }
    let inside = |(index, offset): (u8, u32), len: u64| {
        let size = function.bars.iter().find(|bar| bar.index == index).map_or(0, |bar| bar.size);
        offset % 8 == 0 && u64::from(offset) + len <= size
    };
    let (table, pba) = (msix.table_len(), msix.pba_len());
    let apart = msix.table.0 != msix.pba.0
        || u64::from(msix.table.1) + table <= u64::from(msix.pba.1)
        || u64::from(msix.pba.1) + pba <= u64::from(msix.table.1);
    if inside(msix.table, table) && inside(msix.pba, pba) && apart {
        Ok(())
    } else {
        Err(FunctionError::MsixLocation)
    }
}

struct Builder {
    bytes: Bytes,
    mask: Bytes,
}

impl Builder {
    fn header(&mut self, function: &Function) {
        self.u16(offset::VENDOR, function.vendor, 0);
        self.u16(offset::DEVICE, function.device, 0);
        let command = command::MEMORY
            | command::BUS_MASTER
            | command::PARITY
            | command::SERR
            | command::INTX_DISABLE;
        self.u16(offset::COMMAND, 0, command);
        self.u16(offset::STATUS, CAPABILITIES_LIST, 0);
        self.put(offset::REVISION, &[function.revision], &[0]);
        let [interface, sub, base, _] = function.class.to_le_bytes();
        self.put(offset::CLASS, &[interface, sub, base], &[0; 3]);
        self.put(offset::CACHE_LINE, &[0], &[0xff]);
        for bar in &function.bars {
            let at = offset::BAR0 + 4 * usize::from(bar.index);
            let kind = BAR_MEMORY_64 | if bar.prefetchable { BAR_PREFETCHABLE } else { 0 };
            self.u32(at, kind, 0);
            // Address bits below the size of the region read as 0. Software detects the size by
            // this.
            let address = !(bar.size - 1);
            self.put(at, &u64::from(kind).to_le_bytes(), &address.to_le_bytes());
        }
        self.u16(offset::SUBSYSTEM_VENDOR, function.subsystem_vendor, 0);
        self.u16(offset::SUBSYSTEM, function.subsystem, 0);
        self.put(offset::CAPABILITIES, &[pm_cap::AT as u8], &[0]);
        self.put(offset::INTERRUPT_LINE, &[0], &[0xff]);
        self.put(offset::INTERRUPT_PIN, &[u8::from(function.interrupt_pin)], &[0]);
    }

    fn capabilities(&mut self, function: &Function) {
        let after_pm = if function.msix.is_some() { msix_cap::AT } else { pcie_cap::AT };
        self.put(pm_cap::AT, &[pm_cap::ID, after_pm as u8], &[0; 2]);
        self.u16(pm_cap::CAPABILITIES, pm_cap::VERSION, 0);
        self.u16(pm_cap::CONTROL, pm_cap::NO_SOFT_RESET, pm_cap::POWER_STATE);

        if let Some(msix) = function.msix {
            self.put(msix_cap::AT, &[msix_cap::ID, pcie_cap::AT as u8], &[0; 2]);
            let control = msix_cap::ENABLE | msix_cap::FUNCTION_MASK;
            self.u16(msix_cap::CONTROL, msix.vectors - 1, control);
            self.u32(msix_cap::TABLE, msix.table.1 | u32::from(msix.table.0), 0);
            self.u32(msix_cap::PBA, msix.pba.1 | u32::from(msix.pba.0), 0);
        }

        self.put(pcie_cap::AT, &[pcie_cap::ID, 0], &[0; 2]);
        self.u16(pcie_cap::CAPABILITIES, pcie_cap::VERSION_ENDPOINT, 0);
        let device = pcie_cap::MAX_PAYLOAD_512
            | pcie_cap::EXTENDED_TAG
            | pcie_cap::ROLE_BASED_ERRORS
            | pcie_cap::FLR_CAPABLE;
        self.u32(pcie_cap::DEVICE_CAPABILITIES, device, 0);
        let (control, bits) = (pcie_cap::DEVICE_CONTROL_DEFAULT, pcie_cap::DEVICE_CONTROL_BITS);
        self.u16(pcie_cap::DEVICE_CONTROL, control, bits);
        self.u32(pcie_cap::LINK_CAPABILITIES, u32::from(pcie_cap::SPEED_AND_WIDTH), 0);
        self.u16(pcie_cap::LINK_CONTROL, 0, pcie_cap::LINK_CONTROL_BITS);
        self.u16(pcie_cap::LINK_STATUS, pcie_cap::SPEED_AND_WIDTH, 0);
        self.u32(pcie_cap::DEVICE_CAPABILITIES_2, u32::from(pcie_cap::TIMEOUT_DISABLE), 0);
        self.u16(pcie_cap::DEVICE_CONTROL_2, 0, pcie_cap::TIMEOUT_DISABLE);
        self.u32(pcie_cap::LINK_CAPABILITIES_2, pcie_cap::SPEEDS, 0);
        self.u16(pcie_cap::LINK_CONTROL_2, pcie_cap::TARGET_SPEED, 0xf);

        // Without the serial number, the register is zero, which means an empty list of extended
        // capabilities (7.6.3).
        if let Some(serial) = function.serial {
            self.u32(offset::EXTENDED, SERIAL_NUMBER, 0);
            self.put(offset::EXTENDED + 4, &serial.to_le_bytes(), &[0; 8]);
        }
    }

    fn u16(&mut self, at: usize, value: u16, mask: u16) {
        self.put(at, &value.to_le_bytes(), &mask.to_le_bytes());
    }

    fn u32(&mut self, at: usize, value: u32, mask: u32) {
        self.put(at, &value.to_le_bytes(), &mask.to_le_bytes());
    }

    fn put(&mut self, at: usize, value: &[u8], mask: &[u8]) {
        let registers = self.bytes.iter_mut().zip(self.mask.iter_mut()).skip(at);
        for ((byte, writable), (value, mask)) in registers.zip(value.iter().zip(mask)) {
            *byte = *value;
            *writable = *mask;
        }
    }
}
