//! Command opcodes and their names.

use thiserror::Error;

/// Opcode without a name in this crate. A command with an unknown opcode ends with Invalid Command
/// Opcode (see [`crate::status`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("unknown opcode {0:02X}h")]
pub struct UnknownOpcode(pub u8);

/// Direction of a command's data: the two low bits of every standard opcode. Base 2.1, 5 and 7 (the
/// opcode tables).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataTransfer {
    /// 00b: no data.
    None,
    /// 01b: host to controller.
    ToController,
    /// 10b: controller to host.
    ToHost,
    /// 11b: both directions.
    Bidirectional,
}

/// Data transfer direction of `opcode`, from its two low bits.
pub const fn data_transfer(opcode: u8) -> DataTransfer {
    match opcode & 0b11 {
        0b00 => DataTransfer::None,
        0b01 => DataTransfer::ToController,
        0b10 => DataTransfer::ToHost,
        _ => DataTransfer::Bidirectional,
    }
}

macro_rules! opcodes {
    ($(#[$doc:meta])* $name:ident { $($(#[$var_doc:meta])* $variant:ident = $value:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name {
            $(#[doc = concat!($text, ".")] $(#[$var_doc])* $variant = $value,)*
        }

        impl $name {
            /// All opcodes with a name, in ascending order.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Name in the specification.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }

            /// Direction of the data.
            pub const fn data_transfer(self) -> DataTransfer {
                data_transfer(self as u8)
            }
        }

        impl TryFrom<u8> for $name {
            type Error = UnknownOpcode;

            fn try_from(opcode: u8) -> Result<Self, UnknownOpcode> {
                match opcode {
                    $($value => Ok(Self::$variant),)*
                    _ => Err(UnknownOpcode(opcode)),
                }
            }
        }

        impl From<$name> for u8 {
            fn from(opcode: $name) -> u8 {
                opcode as u8
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

opcodes! {
    /// Admin commands. Base 2.1, 5, "Opcodes for Admin Commands".
    AdminOpcode {
        DeleteIoSq = 0x00, "Delete I/O Submission Queue";
        CreateIoSq = 0x01, "Create I/O Submission Queue";
        GetLogPage = 0x02, "Get Log Page";
        DeleteIoCq = 0x04, "Delete I/O Completion Queue";
        CreateIoCq = 0x05, "Create I/O Completion Queue";
        Identify = 0x06, "Identify";
        Abort = 0x08, "Abort";
        SetFeatures = 0x09, "Set Features";
        GetFeatures = 0x0a, "Get Features";
        AsyncEventRequest = 0x0c, "Asynchronous Event Request";
        NamespaceManagement = 0x0d, "Namespace Management";
        FirmwareCommit = 0x10, "Firmware Commit";
        FirmwareImageDownload = 0x11, "Firmware Image Download";
        DeviceSelfTest = 0x14, "Device Self-test";
        NamespaceAttachment = 0x15, "Namespace Attachment";
        KeepAlive = 0x18, "Keep Alive";
        DirectiveSend = 0x19, "Directive Send";
        DirectiveReceive = 0x1a, "Directive Receive";
        VirtualizationManagement = 0x1c, "Virtualization Management";
        NvmeMiSend = 0x1d, "NVMe-MI Send";
        NvmeMiReceive = 0x1e, "NVMe-MI Receive";
        CapacityManagement = 0x20, "Capacity Management";
        Lockdown = 0x24, "Lockdown";
        DoorbellBufferConfig = 0x7c, "Doorbell Buffer Config";
        Fabrics = 0x7f, "Fabrics";
        FormatNvm = 0x80, "Format NVM";
        SecuritySend = 0x81, "Security Send";
        SecurityReceive = 0x82, "Security Receive";
        Sanitize = 0x84, "Sanitize";
        GetLbaStatus = 0x86, "Get LBA Status";
    }
}

opcodes! {
    /// I/O commands of the NVM and the Zoned Namespace command sets, and commands that are common
    /// to all. Base 2.1, 7; NVM 1.1, 3, "Opcodes for NVM Commands"; ZNS 1.1, "Opcodes".
    NvmOpcode {
        Flush = 0x00, "Flush";
        Write = 0x01, "Write";
        Read = 0x02, "Read";
        WriteUncorrectable = 0x04, "Write Uncorrectable";
        Compare = 0x05, "Compare";
        WriteZeroes = 0x08, "Write Zeroes";
        DatasetManagement = 0x09, "Dataset Management";
        Verify = 0x0c, "Verify";
        ReservationRegister = 0x0d, "Reservation Register";
        ReservationReport = 0x0e, "Reservation Report";
        ReservationAcquire = 0x11, "Reservation Acquire";
        IoManagementReceive = 0x12, "I/O Management Receive";
        ReservationRelease = 0x15, "Reservation Release";
        Cancel = 0x18, "Cancel";
        Copy = 0x19, "Copy";
        IoManagementSend = 0x1d, "I/O Management Send";
        /// Zone commands belong to the Zoned Namespace command set.
        ZoneManagementSend = 0x79, "Zone Management Send";
        ZoneManagementReceive = 0x7a, "Zone Management Receive";
        ZoneAppend = 0x7d, "Zone Append";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_opcode_byte_is_converted_or_refused() {
        let mut admin = 0;
        let mut nvm = 0;
        for byte in 0..=255u8 {
            match AdminOpcode::try_from(byte) {
                Ok(opcode) => {
                    assert_eq!(u8::from(opcode), byte);
                    admin += 1;
                }
                Err(error) => assert_eq!(error, UnknownOpcode(byte)),
            }
            if let Ok(opcode) = NvmOpcode::try_from(byte) {
                assert_eq!(u8::from(opcode), byte);
                nvm += 1;
            }
        }
        assert_eq!(admin, AdminOpcode::ALL.len());
        assert_eq!(nvm, NvmOpcode::ALL.len());
    }

    #[test]
    fn names_and_directions() {
        assert_eq!(AdminOpcode::DoorbellBufferConfig.to_string(), "Doorbell Buffer Config");
        assert_eq!(UnknownOpcode(0xc1).to_string(), "unknown opcode C1h");
        assert_eq!(NvmOpcode::Read.data_transfer(), DataTransfer::ToHost);
        assert_eq!(NvmOpcode::Write.data_transfer(), DataTransfer::ToController);
        assert_eq!(NvmOpcode::Flush.data_transfer(), DataTransfer::None);
        assert_eq!(AdminOpcode::Fabrics.data_transfer(), DataTransfer::Bidirectional);
    }
}
