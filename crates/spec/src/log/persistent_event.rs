//! Log page Persistent Event, 0Dh. Base 2.1, 5.1.12.1.14.
//!
//! The page consists of a [`PersistentEventLog`] and events. Each event is a [`PersistentEvent`],
//! followed by its data.

use crate::layout::zero_default;
use bitfield_struct::bitfield;
use zerocopy::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Actions in the Log Specific Parameter, bits 1:0.
pub mod action {
    /// Read Log Data of the established context.
    pub const READ: u8 = 0;
    /// Establish Context and Read Log Data.
    pub const ESTABLISH: u8 = 1;
    /// Release Context.
    pub const RELEASE: u8 = 2;
    /// Establish Context and Read 512 Bytes of Header.
    pub const ESTABLISH_AND_HEADER: u8 = 3;
}

/// Event Types.
pub mod event_type {
    /// SMART / Health Log Snapshot: the data are the log page SMART / Health Information.
    pub const SMART: u8 = 0x01;
    /// Firmware Commit.
    pub const FIRMWARE_COMMIT: u8 = 0x02;
    /// Timestamp Change: [`TimestampChange`](super::TimestampChange).
    pub const TIMESTAMP_CHANGE: u8 = 0x03;
    /// Power-on or Reset: firmware revision (8 bytes), and
    /// [`ResetInformation`](super::ResetInformation).
    pub const POWER_ON_OR_RESET: u8 = 0x04;
    /// NVM Subsystem Hardware Error.
    pub const HARDWARE_ERROR: u8 = 0x05;
    /// Sanitize Start: [`SanitizeStart`](super::SanitizeStart).
    pub const SANITIZE_START: u8 = 0x09;
    /// Sanitize Completion: [`SanitizeCompletion`](super::SanitizeCompletion).
    pub const SANITIZE_COMPLETION: u8 = 0x0a;
    /// Telemetry Log Created: the data are the first 512 bytes of the telemetry log page.
    pub const TELEMETRY_CREATED: u8 = 0x0c;
    /// Vendor Specific Event: [`VendorEvent`](super::VendorEvent)s, each with data.
    pub const VENDOR: u8 = 0xde;

    /// Name in the specification; `None` for an unknown event type.
    pub const fn name(event: u8) -> Option<&'static str> {
        Some(match event {
            SMART => "SMART / Health Log Snapshot",
            FIRMWARE_COMMIT => "Firmware Commit",
            TIMESTAMP_CHANGE => "Timestamp Change",
            POWER_ON_OR_RESET => "Power-on or Reset",
            HARDWARE_ERROR => "NVM Subsystem Hardware Error",
            SANITIZE_START => "Sanitize Start",
            SANITIZE_COMPLETION => "Sanitize Completion",
            TELEMETRY_CREATED => "Telemetry Log Created",
            VENDOR => "Vendor Specific Event",
            _ => return None,
        })
    }
}

/// Reporting Context Information.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ReportingContext {
    /// Reporting Context Port Identifier.
    pub port: u16,
    /// Reporting Context Port Identifier Type: 0 for no port.
    #[bits(2)]
    pub port_type: u8,
    /// Reporting Context Exists.
    pub exists: bool,
    #[bits(13)]
    __: u16,
}

/// Header of the page.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct PersistentEventLog {
    /// Log Page Identifier.
    pub lid: u8,
    /// Reserved.
    pub reserved1: [u8; 3],
    /// Total Number of Events.
    pub tnev: U32,
    /// Total Log Length in bytes, including this header.
    pub tll: U64,
    /// Log Revision.
    pub lrev: u8,
    /// Reserved.
    pub reserved17: u8,
    /// Log Header Length: number of bytes of this header after this field.
    pub lhl: U16,
    /// Time at which the context was established, encoded as in the feature Timestamp.
    pub timestamp: U64,
    /// Power on Hours.
    pub poh: U128,
    /// Power Cycle Count.
    pub pcc: U64,
    /// PCI Vendor ID.
    pub vid: U16,
    /// PCI Subsystem Vendor ID.
    pub ssvid: U16,
    /// Serial Number.
    pub sn: [u8; 20],
    /// Model Number.
    pub mn: [u8; 40],
    /// NVM Subsystem NVMe Qualified Name.
    pub subnqn: [u8; 256],
    /// Generation Number of the context.
    pub generation: U16,
    /// Reporting Context Information.
    pub rci: [u8; 4],
    /// Reserved.
    pub reserved378: [u8; 102],
    /// Supported Events Bitmap: bit n for event type n.
    pub supported: [u8; 32],
}

zero_default!(PersistentEventLog);

impl PersistentEventLog {
    /// Log Revision of Base 2.0 and later.
    pub const REVISION: u8 = 3;
    /// Value of the field `lhl`: number of bytes of the header after this field.
    pub const LHL: u16 = 512 - 20;

    /// Reporting Context Information.
    pub const fn context(&self) -> ReportingContext {
        ReportingContext::from_bits(u32::from_le_bytes(self.rci))
    }
}

/// Header of an event.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct PersistentEvent {
    /// Event Type, one of [`event_type`].
    pub event: u8,
    /// Event Type Revision.
    pub revision: u8,
    /// Event Header Length: number of bytes of this header after this field.
    pub ehl: u8,
    /// Event Header Additional Information: 0 for no port.
    pub ehai: u8,
    /// Controller Identifier.
    pub cntlid: U16,
    /// Event Timestamp, encoded as in the feature Timestamp.
    pub timestamp: U64,
    /// Port Identifier.
    pub port: U16,
    /// Reserved.
    pub reserved16: [u8; 4],
    /// Vendor Specific Information Length: number of bytes of vendor specific information, which
    /// directly follow this header.
    pub vsil: U16,
    /// Event Length: number of all bytes after this header.
    pub el: U16,
}

zero_default!(PersistentEvent);

impl PersistentEvent {
    /// Value of the field `ehl`: number of bytes of the header after this field.
    pub const EHL: u8 = 24 - 3;
}

/// Controller Reset Information of a Power-on or Reset Event.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ResetInformation {
    /// Controller Identifier.
    pub cntlid: U16,
    /// Firmware Activation: 1 if the reset has activated firmware.
    pub fa: u8,
    /// Operation in Progress.
    pub oip: u8,
    /// Reserved.
    pub reserved4: [u8; 12],
    /// Controller Power Cycle.
    pub power_cycle: U32,
    /// Power on milliseconds.
    pub power_on_ms: U64,
    /// Controller Timestamp.
    pub timestamp: U64,
}

zero_default!(ResetInformation);

/// Data of a Timestamp Change Event.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct TimestampChange {
    /// Previous Timestamp.
    pub previous: U64,
    /// Milliseconds Since Reset.
    pub since_reset_ms: U64,
}

zero_default!(TimestampChange);

/// Data of a Sanitize Start Event.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SanitizeStart {
    /// Sanitize Capabilities, as in Identify Controller.
    pub sanicap: U32,
    /// Dword 10 of the command.
    pub cdw10: U32,
    /// Dword 11 of the command.
    pub cdw11: U32,
}

zero_default!(SanitizeStart);

/// Data of a Sanitize Completion Event.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SanitizeCompletion {
    /// Sanitize Progress, as in the log page Sanitize Status.
    pub sprog: U16,
    /// Sanitize Status, as in the log page Sanitize Status.
    pub sstat: U16,
    /// Completion Information: vendor specific information about a failure.
    pub information: U16,
    /// Reserved.
    pub reserved6: [u8; 2],
}

zero_default!(SanitizeCompletion);

/// Head of a Vendor Specific Event Descriptor.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct VendorEvent {
    /// Vendor Specific Event Code.
    pub code: U16,
    /// Vendor Specific Event Data Type, for example [`VendorEvent::NAME`].
    pub data_type: u8,
    /// UUID Index; 0 for none.
    pub uuid: u8,
    /// Vendor Specific Event Data Length.
    pub len: U16,
}

zero_default!(VendorEvent);

impl VendorEvent {
    /// Data type: name of the event, in ASCII.
    pub const NAME: u8 = 1;
    /// Data type: ASCII.
    pub const ASCII: u8 = 2;
    /// Data type: bytes.
    pub const BINARY: u8 = 3;
    /// Data type: signed integer.
    pub const INTEGER: u8 = 4;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(PersistentEventLog, 512, {
            lid: 0, reserved1: 1, tnev: 4, tll: 8, lrev: 16, reserved17: 17, lhl: 18,
            timestamp: 20, poh: 28, pcc: 44, vid: 52, ssvid: 54, sn: 56, mn: 76, subnqn: 116,
            generation: 372, rci: 374, reserved378: 378, supported: 480,
        });
        assert_layout!(PersistentEvent, 24, {
            event: 0, revision: 1, ehl: 2, ehai: 3, cntlid: 4, timestamp: 6, port: 14,
            reserved16: 16, vsil: 20, el: 22,
        });
        assert_layout!(ResetInformation, 36, {
            cntlid: 0, fa: 2, oip: 3, reserved4: 4, power_cycle: 16, power_on_ms: 20,
            timestamp: 28,
        });
        assert_layout!(TimestampChange, 16, { previous: 0, since_reset_ms: 8 });
        assert_layout!(SanitizeStart, 12, { sanicap: 0, cdw10: 4, cdw11: 8 });
        assert_layout!(SanitizeCompletion, 8, {
            sprog: 0, sstat: 2, information: 4, reserved6: 6,
        });
        assert_layout!(VendorEvent, 6, { code: 0, data_type: 2, uuid: 3, len: 4 });
        let context = ReportingContext::new().with_exists(true);
        assert_eq!(context.into_bits(), 1 << 18);
    }
}
