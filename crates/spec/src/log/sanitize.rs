//! Log page Sanitize Status, 81h. Base 2.1, 5.1.12.1.33.

use crate::layout::zero_default;
use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Sanitize Operation Status: state of the most recent sanitize operation.
pub mod sos {
    /// No sanitize operation was ever started.
    pub const NEVER: u8 = 0;
    /// The operation was successful.
    pub const SUCCESSFUL: u8 = 1;
    /// An operation is in progress.
    pub const IN_PROGRESS: u8 = 2;
    /// The operation failed.
    pub const FAILED: u8 = 3;
    /// The operation was successful, but blocks were deallocated despite No-Deallocate.
    pub const DEALLOCATED: u8 = 4;

    /// Description; `None` for a reserved value.
    pub const fn name(sos: u8) -> Option<&'static str> {
        Some(match sos {
            NEVER => "never sanitized",
            SUCCESSFUL => "successful",
            IN_PROGRESS => "in progress",
            FAILED => "failed",
            DEALLOCATED => "successful, with unexpected deallocation",
            _ => return None,
        })
    }
}

/// Sanitize Status.
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SanitizeState {
    /// Sanitize Operation Status: one of [`sos`].
    #[bits(3)]
    pub sos: u8,
    /// Overwrite Passes Completed.
    #[bits(5)]
    pub opc: u8,
    /// Global Data Erased: no user data were written since the last successful sanitize operation,
    /// or no user data were ever written.
    pub gde: bool,
    #[bits(7)]
    __: u8,
}

/// Log page Sanitize Status.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SanitizeLog {
    /// Sanitize Progress in 65536ths; FFFFh if no operation is in progress.
    pub sprog: u16,
    /// Sanitize Status.
    pub sstat: SanitizeState,
    /// Sanitize Command Dword 10 Information: CDW10 of the command that has started the operation.
    pub scdw10: u32,
    /// Estimated Time For Overwrite in seconds; FFFFFFFFh if not reported.
    pub eto: u32,
    /// Estimated Time For Block Erase in seconds.
    pub etbe: u32,
    /// Estimated Time For Crypto Erase in seconds.
    pub etce: u32,
    /// Estimated Time For Overwrite With No-Deallocate, in seconds.
    pub etond: u32,
    /// Estimated Time For Block Erase With No-Deallocate, in seconds.
    pub etbend: u32,
    /// Estimated Time For Crypto Erase With No-Deallocate, in seconds.
    pub etcend: u32,
    /// Estimated Time For Post-Verification Deallocation State, in seconds.
    pub etpvds: u32,
    /// Sanitize State Information.
    pub ssi: u8,
    /// Reserved.
    pub reserved37: [u8; 475],
}

impl SanitizeLog {
    /// Value of SPROG while no operation is in progress.
    pub const NO_PROGRESS: u16 = 0xffff;
    /// Value of an estimated time that is not reported.
    pub const NO_ESTIMATE: u32 = 0xffff_ffff;
}

zero_default!(SanitizeLog);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(SanitizeLog, 512, {
            sprog: 0, sstat: 2, scdw10: 4, eto: 8, etbe: 12, etce: 16, etond: 20, etbend: 24,
            etcend: 28, etpvds: 32, ssi: 36, reserved37: 37,
        });
        assert_eq!(SanitizeState::from_bits(0x0113).sos(), sos::FAILED);
        assert_eq!(SanitizeState::from_bits(0x0113).opc(), 2);
        assert!(SanitizeState::from_bits(0x0113).gde());
        assert_eq!(sos::name(5), None);
    }
}
