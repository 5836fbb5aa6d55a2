//! Log pages of errors, health, firmware and changed namespaces.

use crate::layout::zero_default;
use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Parameter Error Location: position of the error in the command. Base 2.1, 5.1.12.1.2.
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ParameterLocation {
    /// Byte of the command, 0 to 63.
    pub byte: u8,
    /// Bit of that byte.
    #[bits(3)]
    pub bit: u8,
    #[bits(5)]
    __: u8,
}

impl ParameterLocation {
    /// Error that is not specific to a parameter.
    pub const NONE: Self = Self::from_bits(0xffff);
}

/// Entry of the Error Information log page, 01h: 64 bytes, all zero if unused. Base 2.1,
/// 5.1.12.1.2.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ErrorLogEntry {
    /// Error Count: unique number of the error, from 1; 0 for an unused entry.
    pub error_count: u64,
    /// Submission Queue ID; FFFFh if the error is not specific to a command.
    pub sqid: u16,
    /// Command ID; FFFFh if the error is not specific to a command.
    pub cid: u16,
    /// Status Info: the status word of a completion queue entry, including the phase tag.
    pub status: u16,
    /// Parameter Error Location.
    pub parameter: ParameterLocation,
    /// First LBA with the error.
    pub lba: u64,
    /// Namespace.
    pub nsid: u32,
    /// Vendor Specific Information Available: a log page identifier, or 0.
    pub vendor_lid: u8,
    /// Transport Type; 0 if the error is not related to the transport.
    pub trtype: u8,
    /// Command Set Indicator, if `version` is 1.
    pub csi: u8,
    /// Opcode, if `version` is 1.
    pub opcode: u8,
    /// Command Specific Information.
    pub command_specific: u64,
    /// Transport Type Specific Information.
    pub transport_specific: u16,
    /// Reserved.
    pub reserved42: [u8; 21],
    /// Log Page Version: 1 if `csi` and `opcode` are valid.
    pub version: u8,
}

/// Critical Warning. Base 2.1, 5.1.12.1.3.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct CriticalWarning {
    /// Available spare is below its threshold.
    pub spare: bool,
    /// A temperature is over or under its threshold.
    pub temperature: bool,
    /// Reliability is degraded by media or internal errors.
    pub reliability: bool,
    /// All of the media is read only.
    pub read_only: bool,
    /// The backup of volatile memory has failed.
    pub volatile_backup: bool,
    /// The Persistent Memory Region is read only or unreliable.
    pub persistent_memory: bool,
    #[bits(2)]
    __: u8,
}

/// SMART / Health Information, log page 02h. Base 2.1, 5.1.12.1.3.
///
/// Counters cover the lifetime of the controller and are retained across power cycles.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SmartHealth {
    /// Critical Warning.
    pub critical_warning: CriticalWarning,
    /// Composite Temperature in kelvins.
    pub temperature: U16,
    /// Available Spare in percent.
    pub available_spare: u8,
    /// Available Spare Threshold in percent.
    pub available_spare_threshold: u8,
    /// Percentage Used; may exceed 100.
    pub percentage_used: u8,
    /// Endurance Group Critical Warning Summary.
    pub endurance_group_warning: u8,
    /// Reserved.
    pub reserved7: [u8; 25],
    /// Data Units Read, in units of 1000 * 512 bytes, rounded up.
    pub data_units_read: U128,
    /// Data Units Written, in units of 1000 * 512 bytes, rounded up.
    pub data_units_written: U128,
    /// Host Read Commands: number of completed Read, Compare, Verify and similar commands.
    pub host_read_commands: U128,
    /// Host Write Commands: number of completed Write and similar commands.
    pub host_write_commands: U128,
    /// Controller Busy Time in minutes.
    pub controller_busy_time: U128,
    /// Power Cycles.
    pub power_cycles: U128,
    /// Power On Hours.
    pub power_on_hours: U128,
    /// Unexpected Power Losses ("Unsafe Shutdowns" before 2.1).
    pub unsafe_shutdowns: U128,
    /// Media and Data Integrity Errors.
    pub media_errors: U128,
    /// Number of Error Information Log Entries.
    pub error_log_entries: U128,
    /// Warning Composite Temperature Time in minutes.
    pub warning_temperature_time: u32,
    /// Critical Composite Temperature Time in minutes.
    pub critical_temperature_time: u32,
    /// Temperature Sensors 1 to 8 in kelvins; 0 if there is none.
    pub temperature_sensors: [u16; 8],
    /// Thermal Management Temperature 1 Transition Count.
    pub thermal_transitions_1: u32,
    /// Thermal Management Temperature 2 Transition Count.
    pub thermal_transitions_2: u32,
    /// Total Time For Thermal Management Temperature 1 in seconds.
    pub thermal_time_1: u32,
    /// Total Time For Thermal Management Temperature 2 in seconds.
    pub thermal_time_2: u32,
    /// Reserved.
    pub reserved232: [u8; 280],
}

/// Active Firmware Info. Base 2.1, 5.1.12.1.4.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Afi {
    /// Slot of the running firmware, 1 to 7.
    #[bits(3)]
    pub active: u8,
    #[bits(1)]
    __: u8,
    /// Slot that the next Controller Level Reset activates; 0 if not reported.
    #[bits(3)]
    pub next: u8,
    #[bits(1)]
    __: u8,
}

/// Firmware Slot Information, log page 03h. Base 2.1, 5.1.12.1.4.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct FirmwareSlot {
    /// Active Firmware Info.
    pub afi: Afi,
    /// Reserved.
    pub reserved1: [u8; 7],
    /// Firmware Revision for Slots 1 to 7, ASCII; all zero if the slot is empty.
    pub frs: [[u8; 8]; 7],
    /// Reserved.
    pub reserved64: [u8; 448],
}

/// Changed Attached Namespace List, log page 04h: namespaces changed since the page was last read.
/// Base 2.1, 5.1.12.1.5.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ChangedNamespaces {
    /// Namespace identifiers in ascending order, then zeroes; or FFFFFFFFh and zeroes if more than
    /// 1024 have changed.
    pub nsids: [u32; 1024],
}

impl ChangedNamespaces {
    /// Creates the page for the namespace identifiers `changed`, which must be in ascending order.
    pub fn new(changed: impl IntoIterator<Item = u32>) -> Self {
        let mut page = Self::default();
        let mut changed = changed.into_iter();
        for (entry, nsid) in page.nsids.iter_mut().zip(changed.by_ref()) {
            *entry = nsid;
        }
        if changed.next().is_some() {
            page = Self::default();
            page.nsids[0] = crate::sqe::NSID_ALL;
        }
        page
    }

    /// True if more than 1024 namespaces have changed, so that the page does not list them.
    pub const fn overflowed(&self) -> bool {
        self.nsids[0] == crate::sqe::NSID_ALL
    }

    /// Identifiers up to the first zero. There are none if the list
    /// [`overflowed`](Self::overflowed).
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.nsids.iter().copied().take_while(|&nsid| nsid != 0 && nsid != crate::sqe::NSID_ALL)
    }
}

zero_default!(ErrorLogEntry, SmartHealth, FirmwareSlot, ChangedNamespaces);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(ErrorLogEntry, 64, {
            error_count: 0, sqid: 8, cid: 10, status: 12, parameter: 14, lba: 16, nsid: 24,
            vendor_lid: 28, trtype: 29, csi: 30, opcode: 31, command_specific: 32,
            transport_specific: 40, reserved42: 42, version: 63,
        });
        assert_layout!(SmartHealth, 512, {
            critical_warning: 0, temperature: 1, available_spare: 3,
            available_spare_threshold: 4, percentage_used: 5, endurance_group_warning: 6,
            reserved7: 7, data_units_read: 32, data_units_written: 48, host_read_commands: 64,
            host_write_commands: 80, controller_busy_time: 96, power_cycles: 112,
            power_on_hours: 128, unsafe_shutdowns: 144, media_errors: 160, error_log_entries: 176,
            warning_temperature_time: 192, critical_temperature_time: 196,
            temperature_sensors: 200, thermal_transitions_1: 216, thermal_transitions_2: 220,
            thermal_time_1: 224, thermal_time_2: 228, reserved232: 232,
        });
        assert_layout!(FirmwareSlot, 512, { afi: 0, reserved1: 1, frs: 8, reserved64: 64 });
        assert_layout!(ChangedNamespaces, 4096, { nsids: 0 });
    }

    #[test]
    fn bits() {
        assert_eq!(ParameterLocation::new().with_byte(40).with_bit(7).into_bits(), 0x0728);
        assert_eq!(ParameterLocation::NONE.into_bits(), 0xffff);
        assert_eq!(CriticalWarning::new().with_spare(true).into_bits(), 1 << 0);
        assert_eq!(CriticalWarning::new().with_temperature(true).into_bits(), 1 << 1);
        assert_eq!(CriticalWarning::new().with_reliability(true).into_bits(), 1 << 2);
        assert_eq!(CriticalWarning::new().with_read_only(true).into_bits(), 1 << 3);
        assert_eq!(CriticalWarning::new().with_volatile_backup(true).into_bits(), 1 << 4);
        assert_eq!(CriticalWarning::new().with_persistent_memory(true).into_bits(), 1 << 5);
        assert_eq!(Afi::new().with_active(1).with_next(2).into_bits(), 0x21);
    }

    #[test]
    fn changed_namespaces() {
        let page = ChangedNamespaces::new([1, 9]);
        assert!(!page.overflowed());
        assert_eq!(page.iter().collect::<Vec<_>>(), [1, 9]);
        let page = ChangedNamespaces::new(1..=1024);
        assert!(!page.overflowed());
        assert_eq!(page.iter().count(), 1024);
        let page = ChangedNamespaces::new(1..=1025);
        assert!(page.overflowed());
        assert_eq!(page.iter().count(), 0);
        assert_eq!(page.nsids[1..], [0; 1023]);
    }
}
