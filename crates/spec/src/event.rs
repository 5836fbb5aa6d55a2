//! Asynchronous events, which complete an Asynchronous Event Request. Base 2.1, 5.1.2
//! "Asynchronous Event Request command".

use crate::log::lid;

/// Asynchronous event: dword 0 of the completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AsyncEvent {
    /// Asynchronous Event Type, 3 bits: one of the `TYPE_` constants.
    pub kind: u8,
    /// Asynchronous Event Information: the event within its type.
    pub info: u8,
    /// Log Page Identifier of the log page with details. A read of that page without RAE clears the
    /// event.
    pub lid: u8,
}

/// Type 0h: error.
pub const TYPE_ERROR: u8 = 0;
/// Type 1h: SMART / health status.
pub const TYPE_SMART: u8 = 1;
/// Type 2h: notice.
pub const TYPE_NOTICE: u8 = 2;
/// Type 3h: immediate; no log page needs to be read.
pub const TYPE_IMMEDIATE: u8 = 3;
/// Type 4h: one-shot.
pub const TYPE_ONE_SHOT: u8 = 4;
/// Type 6h: specific to an I/O command set.
pub const TYPE_IO_COMMAND_SET: u8 = 6;
/// Type 7h: vendor specific.
pub const TYPE_VENDOR: u8 = 7;

macro_rules! events {
    ($($name:ident = ($kind:ident, $info:literal, $lid:ident), $text:literal;)*) => {
        impl AsyncEvent {
            $(
                #[doc = concat!($text, ".")]
                pub const $name: Self = Self { kind: $kind, info: $info, lid: lid::$lid };
            )*

            /// All events with a name.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Name in the specification, by type and information; `None` for an unknown event.
            pub const fn name(&self) -> Option<&'static str> {
                match (self.kind, self.info) {
                    $(($kind, $info) => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

events! {
    INVALID_DOORBELL_REGISTER = (TYPE_ERROR, 0x00, ERROR_INFORMATION),
        "Write to Invalid Doorbell Register";
    INVALID_DOORBELL_VALUE = (TYPE_ERROR, 0x01, ERROR_INFORMATION),
        "Invalid Doorbell Write Value";
    DIAGNOSTIC_FAILURE = (TYPE_ERROR, 0x02, ERROR_INFORMATION),
        "Diagnostic Failure";
    PERSISTENT_INTERNAL_ERROR = (TYPE_ERROR, 0x03, ERROR_INFORMATION),
        "Persistent Internal Error";
    TRANSIENT_INTERNAL_ERROR = (TYPE_ERROR, 0x04, ERROR_INFORMATION),
        "Transient Internal Error";
    FIRMWARE_IMAGE_LOAD_ERROR = (TYPE_ERROR, 0x05, ERROR_INFORMATION),
        "Firmware Image Load Error";
    SUBSYSTEM_RELIABILITY = (TYPE_SMART, 0x00, SMART_HEALTH),
        "NVM subsystem Reliability";
    TEMPERATURE_THRESHOLD = (TYPE_SMART, 0x01, SMART_HEALTH),
        "Temperature Threshold";
    SPARE_BELOW_THRESHOLD = (TYPE_SMART, 0x02, SMART_HEALTH),
        "Spare Below Threshold";
    NAMESPACE_ATTRIBUTE_CHANGED = (TYPE_NOTICE, 0x00, CHANGED_ATTACHED_NAMESPACES),
        "Attached Namespace Attribute Changed";
    FIRMWARE_ACTIVATION_STARTING = (TYPE_NOTICE, 0x01, FIRMWARE_SLOT),
        "Firmware Activation Starting";
    TELEMETRY_LOG_CHANGED = (TYPE_NOTICE, 0x02, TELEMETRY_CONTROLLER),
        "Telemetry Log Changed";
    ANA_CHANGE = (TYPE_NOTICE, 0x03, ANA),
        "Asymmetric Namespace Access Change";
    RESERVATION_LOG_PAGE = (TYPE_IO_COMMAND_SET, 0x00, RESERVATION_NOTIFICATION),
        "Reservation Log Page Available";
    SANITIZE_COMPLETED = (TYPE_IO_COMMAND_SET, 0x01, SANITIZE_STATUS),
        "Sanitize Operation Completed";
}

impl AsyncEvent {
    /// Decodes dword 0 of a completion.
    pub const fn from_dw0(dw0: u32) -> Self {
        Self { kind: (dw0 & 7) as u8, info: (dw0 >> 8) as u8, lid: (dw0 >> 16) as u8 }
    }

    /// Encodes dword 0 of a completion: type in bits 2:0, information in 15:8, log page in 23:16.
    pub const fn dw0(self) -> u32 {
        self.kind as u32 & 7 | (self.info as u32) << 8 | (self.lid as u32) << 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn encoding() {
        assert_eq!(AsyncEvent::INVALID_DOORBELL_REGISTER.dw0(), 0x01_00_00);
        assert_eq!(AsyncEvent::INVALID_DOORBELL_VALUE.dw0(), 0x01_01_00);
        assert_eq!(AsyncEvent::TEMPERATURE_THRESHOLD.dw0(), 0x02_01_01);
        assert_eq!(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.dw0(), 0x04_00_02);
        assert_eq!(AsyncEvent::FIRMWARE_ACTIVATION_STARTING.dw0(), 0x03_01_02);
        assert_eq!(AsyncEvent::TELEMETRY_LOG_CHANGED.dw0(), 0x08_02_02);
        assert_eq!(AsyncEvent::SANITIZE_COMPLETED.dw0(), 0x81_01_06);
        for event in AsyncEvent::ALL {
            assert!(event.name().is_some());
            assert_eq!(AsyncEvent::from_dw0(event.dw0()), *event);
        }
        assert_eq!(AsyncEvent::from_dw0(0x0700_0005).name(), None);
    }

    proptest! {
        #[test]
        fn any_dword_decodes(dw0: u32) {
            let event = AsyncEvent::from_dw0(dw0);
            prop_assert_eq!(event.dw0(), dw0 & 0x00ff_ff07);
        }
    }
}
