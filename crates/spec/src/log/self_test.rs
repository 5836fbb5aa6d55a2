//! Log page Device Self-test, 06h. Base 2.1, 5.1.12.1.7.

use bitfield_struct::bitfield;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Self-test Codes: action of a Device Self-test command, and type of an operation.
pub mod stc {
    /// No operation in progress.
    pub const NONE: u8 = 0x0;
    /// Short operation.
    pub const SHORT: u8 = 0x1;
    /// Extended operation.
    pub const EXTENDED: u8 = 0x2;
    /// Vendor specific operation.
    pub const VENDOR: u8 = 0xe;
    /// Abort the operation in progress.
    pub const ABORT: u8 = 0xf;
}

/// Device Self-test Results.
pub mod self_test_result {
    /// Completed without an error.
    pub const PASSED: u8 = 0x0;
    /// Aborted by a Device Self-test command.
    pub const ABORTED_BY_COMMAND: u8 = 0x1;
    /// Aborted by a Controller Level Reset.
    pub const ABORTED_BY_RESET: u8 = 0x2;
    /// Aborted because a namespace was removed.
    pub const ABORTED_BY_REMOVAL: u8 = 0x3;
    /// Aborted by a Format NVM command.
    pub const ABORTED_BY_FORMAT: u8 = 0x4;
    /// Fatal or unknown error: the operation did not complete.
    pub const FATAL: u8 = 0x5;
    /// An unknown segment has failed.
    pub const UNKNOWN_SEGMENT_FAILED: u8 = 0x6;
    /// One or more segments have failed. The field Segment Number contains the number of the first
    /// of them.
    pub const SEGMENT_FAILED: u8 = 0x7;
    /// Aborted for an unknown reason.
    pub const ABORTED: u8 = 0x8;
    /// Aborted by a sanitize operation.
    pub const ABORTED_BY_SANITIZE: u8 = 0x9;
    /// Unused entry.
    pub const UNUSED: u8 = 0xf;

    /// Description; `None` for an unused entry or a reserved value.
    pub const fn name(result: u8) -> Option<&'static str> {
        Some(match result {
            PASSED => "passed",
            ABORTED_BY_COMMAND => "aborted by a Device Self-test command",
            ABORTED_BY_RESET => "aborted by a Controller Level Reset",
            ABORTED_BY_REMOVAL => "aborted because a namespace was removed",
            ABORTED_BY_FORMAT => "aborted by a Format NVM command",
            FATAL => "ended early by a fatal or unknown error",
            UNKNOWN_SEGMENT_FAILED => "failed, in an unknown segment",
            SEGMENT_FAILED => "failed",
            ABORTED => "aborted for an unknown reason",
            ABORTED_BY_SANITIZE => "aborted by a sanitize operation",
            _ => return None,
        })
    }
}

/// Valid Diagnostic Information: the valid fields of a result.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct ValidDiagnostics {
    /// Namespace Identifier.
    pub nsid: bool,
    /// Failing LBA.
    pub flba: bool,
    /// Status Code Type.
    pub sct: bool,
    /// Status Code.
    pub sc: bool,
    #[bits(4)]
    __: u8,
}

/// Self-test Result.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SelfTestResult {
    /// Device Self-test Status: [result](self_test_result) in bits 3:0, [code](stc) in bits 7:4.
    pub dsts: u8,
    /// Segment Number.
    pub segment: u8,
    /// Valid Diagnostic Information.
    pub valid: ValidDiagnostics,
    /// Reserved.
    pub reserved3: u8,
    /// Power On Hours at the end of the operation.
    pub poh: U64,
    /// Namespace Identifier.
    pub nsid: U32,
    /// Failing LBA.
    pub flba: U64,
    /// Status Code Type, in bits 2:0.
    pub sct: u8,
    /// Status Code.
    pub sc: u8,
    /// Vendor Specific.
    pub vendor: [u8; 2],
}

impl SelfTestResult {
    /// Unused entry.
    pub const UNUSED: Self = Self {
        dsts: self_test_result::UNUSED,
        segment: 0,
        valid: ValidDiagnostics::new(),
        reserved3: 0,
        poh: U64::ZERO,
        nsid: U32::ZERO,
        flba: U64::ZERO,
        sct: 0,
        sc: 0,
        vendor: [0; 2],
    };

    /// Result: one of [`self_test_result`].
    pub const fn result(&self) -> u8 {
        self.dsts & 0xf
    }

    /// Self-test Code: one of [`stc`].
    pub const fn code(&self) -> u8 {
        self.dsts >> 4
    }
}

/// Log page Device Self-test.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SelfTestLog {
    /// Current Device Self-test Operation, in bits 3:0.
    pub operation: u8,
    /// Current Device Self-test Completion in percent, in bits 6:0.
    pub completion: u8,
    /// Reserved.
    pub reserved2: [u8; 2],
    /// Results, newest first.
    pub results: [SelfTestResult; SelfTestLog::RESULTS],
}

impl SelfTestLog {
    /// Number of results.
    pub const RESULTS: usize = 20;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(SelfTestResult, 28, {
            dsts: 0, segment: 1, valid: 2, reserved3: 3, poh: 4, nsid: 12, flba: 16, sct: 24,
            sc: 25, vendor: 26,
        });
        assert_layout!(SelfTestLog, 564, { operation: 0, completion: 1, reserved2: 2, results: 4 });
        let result = SelfTestResult { dsts: 0x27, ..SelfTestResult::UNUSED };
        assert_eq!((result.code(), result.result()), (stc::EXTENDED, 7));
        assert_eq!(self_test_result::name(SelfTestResult::UNUSED.result()), None);
    }
}
