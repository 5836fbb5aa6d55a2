//! Configuration space of a PCI Express endpoint function with one type 0 header.
//!
//! # Architecture
//!
//! [`ConfigSpace`] consists of 4096 bytes, and a mask of the bits that a write can change. For most
//! registers this is sufficient. For example, the address bits of a base address register below the
//! size of its region are not writable, and software detects the size by this. For registers with
//! side effects, a write compares the values before and after it, and reports changes in
//! [`Effects`].
//!
//! The capabilities in list order are Power Management (D0 and D3hot), MSI-X, and PCI Express
//! (endpoint, function level reset). The extended space has a Device Serial Number if a number is
//! given, and otherwise an empty list.
//!
//! # Not implemented
//!
//! I/O space, 32-bit base address registers, expansion ROM, MSI (MSI-X is present instead), power
//! management events, error reporting, slots and bridges. If a guest needs such registers, its VMM
//! emulates them.

mod layout;
mod msix;

pub use layout::{Bar, CONFIG_SIZE, Function, FunctionError, Msix};
pub use msix::MsixTable;

use crate::Errno;
use layout::{msix_cap, offset, pcie_cap, pm_cap};

/// Bits of the command register (PCI Express Base Specification, 7.5.1.1.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Command {
    /// The function responds to memory accesses.
    pub memory: bool,
    /// The function may access host memory and send interrupt messages.
    pub bus_master: bool,
    /// The function must not assert its interrupt pin.
    pub intx_disabled: bool,
}

/// MSI-X Message Control (PCI Express Base Specification, 7.7.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MsixControl {
    /// The function sends interrupts as messages, and does not use the pin.
    pub enabled: bool,
    /// All vectors are masked, independently of the table.
    pub masked: bool,
}

/// Power state of the function (PCI Express Base Specification, 7.5.2.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Power {
    /// Full operation.
    #[default]
    D0,
    /// Only the configuration space is accessible. The function keeps its state, because
    /// No_Soft_Reset is set.
    D3Hot,
}

/// Register changes of one write to which the caller has to react. `None` and `false` mean
/// unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Effects {
    /// New command register.
    pub command: Option<Command>,
    /// New MSI-X Message Control.
    pub msix: Option<MsixControl>,
    /// New power state.
    pub power: Option<Power>,
    /// A base address register was changed.
    pub bars: bool,
    /// Initiate Function Level Reset was written (PCI Express Base Specification, 6.6.2). The
    /// configuration space is already reset, and the other members contain its changes. The caller
    /// has to reset the rest of the function.
    pub function_level_reset: bool,
}

/// Configuration space of a function.
#[derive(Clone)]
pub struct ConfigSpace {
    bytes: Box<[u8; CONFIG_SIZE]>,
    writable: Box<[u8; CONFIG_SIZE]>,
    power_on: Box<[u8; CONFIG_SIZE]>,
    has_msix: bool,
}

impl ConfigSpace {
    /// Creates the configuration space of `function`, with power-on values.
    ///
    /// # Errors
    ///
    /// `function` is invalid.
    pub fn new(function: &Function) -> Result<Self, FunctionError> {
        let (bytes, writable) = layout::build(function)?;
        Ok(Self { power_on: bytes.clone(), bytes, writable, has_msix: function.msix.is_some() })
    }

    /// Reads `data.len()` bytes from `offset`, with any size and alignment.
    ///
    /// # Errors
    ///
    /// [`Errno::INVAL`] if the range exceeds the configuration space.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        let range = range(offset, data.len())?;
        data.copy_from_slice(self.bytes.get(range).ok_or(Errno::INVAL)?);
        Ok(())
    }

    /// Writes `data` at `offset`, with any size and alignment. Read-only bits keep their values.
    ///
    /// # Errors
    ///
    /// [`Errno::INVAL`] if the range exceeds the configuration space.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<Effects, Errno> {
        let range = range(offset, data.len())?;
        let before = self.state();
        let bars = self.bars();
        let old_power = self.u16(pm_cap::CONTROL);
        let bytes = self.bytes.get_mut(range.clone()).ok_or(Errno::INVAL)?;
        let masks = self.writable.get(range).ok_or(Errno::INVAL)?;
        for ((byte, mask), new) in bytes.iter_mut().zip(masks).zip(data) {
            *byte = *byte & !mask | new & mask;
        }
        // Writing D1 or D2 has no effect, because these states are not supported (7.5.2.2,
        // PowerState).
        if matches!(self.u16(pm_cap::CONTROL) & pm_cap::POWER_STATE, 1 | 2) {
            self.set_u16(pm_cap::CONTROL, old_power);
        }
        // Initiate Function Level Reset always reads as 0.
        let reset = self.u16(pcie_cap::DEVICE_CONTROL) & pcie_cap::INITIATE_FLR != 0;
        if reset {
            self.reset();
        }
        let after = self.state();
        Ok(Effects {
            command: (before.0 != after.0).then_some(after.0),
            msix: (before.1 != after.1).then_some(after.1),
            power: (before.2 != after.2).then_some(after.2),
            bars: bars != self.bars(),
            function_level_reset: reset,
        })
    }

    /// Restores the power-on values.
    pub fn reset(&mut self) {
        self.bytes.copy_from_slice(&*self.power_on);
    }

    /// Command register.
    pub fn command(&self) -> Command {
        let command = self.u16(offset::COMMAND);
        Command {
            memory: command & layout::command::MEMORY != 0,
            bus_master: command & layout::command::BUS_MASTER != 0,
            intx_disabled: command & layout::command::INTX_DISABLE != 0,
        }
    }

    /// MSI-X Message Control. Without the capability, both fields are false.
    pub fn msix(&self) -> MsixControl {
        if !self.has_msix {
            return MsixControl::default();
        }
        let control = self.u16(msix_cap::CONTROL);
        MsixControl {
            enabled: control & msix_cap::ENABLE != 0,
            masked: control & msix_cap::FUNCTION_MASK != 0,
        }
    }

    /// Power state.
    pub fn power(&self) -> Power {
        match self.u16(pm_cap::CONTROL) & pm_cap::POWER_STATE {
            3 => Power::D3Hot,
            _ => Power::D0,
        }
    }

    /// Address in base address register pair `index` (0, 2 or 4).
    pub fn bar(&self, index: u8) -> u64 {
        let at = offset::BAR0 + 4 * usize::from(index.min(4) & !1);
        let mut value = [0; 8];
        if let Some(bytes) = self.bytes.get(at..at + 8) {
            value.copy_from_slice(bytes);
        }
        u64::from_le_bytes(value) & !0xf
    }

    /// Sets the bit Interrupt Status, which shows a pending interrupt of the pin.
    pub fn set_interrupt_status(&mut self, pending: bool) {
        let status = self.u16(offset::STATUS) & !layout::INTERRUPT_STATUS;
        let bit = if pending { layout::INTERRUPT_STATUS } else { 0 };
        self.set_u16(offset::STATUS, status | bit);
    }

    /// Values of all registers, for a later [`restore`](Self::restore).
    pub fn bytes(&self) -> &[u8; CONFIG_SIZE] {
        &self.bytes
    }

    /// Sets the writable bits to their values in `bytes`. Read-only bits stay unchanged.
    pub fn restore(&mut self, bytes: &[u8; CONFIG_SIZE]) {
        for ((byte, mask), new) in self.bytes.iter_mut().zip(self.writable.iter()).zip(bytes) {
            *byte = *byte & !mask | new & mask;
        }
        let control = self.u16(pcie_cap::DEVICE_CONTROL);
        self.set_u16(pcie_cap::DEVICE_CONTROL, control & !pcie_cap::INITIATE_FLR);
    }

    fn state(&self) -> (Command, MsixControl, Power) {
        (self.command(), self.msix(), self.power())
    }

    fn bars(&self) -> [u64; 3] {
        [self.bar(0), self.bar(2), self.bar(4)]
    }

    fn u16(&self, at: usize) -> u16 {
        match self.bytes.get(at..at + 2) {
            Some(&[low, high]) => u16::from_le_bytes([low, high]),
            _ => 0,
        }
    }

    fn set_u16(&mut self, at: usize, value: u16) {
        if let Some(bytes) = self.bytes.get_mut(at..at + 2) {
            bytes.copy_from_slice(&value.to_le_bytes());
        }
    }
}

impl std::fmt::Debug for ConfigSpace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ConfigSpace")
            .field("command", &self.command())
            .field("msix", &self.msix())
            .field("power", &self.power())
            .field("bars", &self.bars())
            .finish_non_exhaustive()
    }
}

fn range(offset: u64, len: usize) -> Result<std::ops::Range<usize>, Errno> {
    let start = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
    match start.checked_add(len) {
        Some(end) if end <= CONFIG_SIZE => Ok(start..end),
        _ => Err(Errno::INVAL),
    }
}

#[cfg(test)]
mod tests;
