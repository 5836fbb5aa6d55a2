//! Completion queue entry: 16 bytes. Base 2.1, 4.2.1.

use crate::Status;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Completion queue entry, in memory layout.
///
/// The last two bytes contain the phase tag. A host polls the phase tag, so these two bytes of a
/// posted entry must become visible last.
#[repr(C, align(4))]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct Cqe {
    /// Command specific result, dword 0.
    pub dw0: u32,
    /// Command specific result, dword 1.
    pub dw1: u32,
    /// Submission Queue Head Pointer: the host may reuse the entries before it.
    pub sq_head: u16,
    /// Submission Queue Identifier.
    pub sq_id: u16,
    /// Command Identifier of the command that completed.
    pub cid: u16,
    /// Phase tag in bit 0, [`Status`] in bits 15:1.
    pub status: u16,
}

impl Cqe {
    /// Size of an entry in bytes. CC.IOCQES is 4, because `1 << 4` is 16.
    pub const SIZE: usize = 16;

    /// Creates a completion. The phase tag is 0 until [`with_phase`](Self::with_phase) sets it.
    #[inline]
    pub const fn new(cid: u16, sq_id: u16, sq_head: u16, status: Status, dw0: u32) -> Self {
        Self { dw0, dw1: 0, sq_head, sq_id, cid, status: status.bits() << 1 }
    }

    /// Phase tag. Base 2.1, 4.2.4 "Phase Tag": inverted with every pass through the queue, and 1 in
    /// the entries of the first pass.
    #[inline]
    pub const fn phase(&self) -> bool {
        self.status & 1 != 0
    }

    /// Status without the phase tag.
    pub const fn status(&self) -> Status {
        Status::from_bits(self.status >> 1)
    }

    /// Sets the phase tag.
    #[inline]
    #[must_use]
    pub const fn with_phase(mut self, phase: bool) -> Self {
        self.status = self.status & !1 | phase as u16;
        self
    }

    /// Sets the status; the phase tag is unchanged.
    #[must_use]
    pub const fn with_status(mut self, status: Status) -> Self {
        self.status = status.bits() << 1 | self.status & 1;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::{offset_of, size_of};

    #[test]
    fn layout() {
        assert_eq!(size_of::<Cqe>(), 16);
        assert_eq!(offset_of!(Cqe, dw0), 0);
        assert_eq!(offset_of!(Cqe, dw1), 4);
        assert_eq!(offset_of!(Cqe, sq_head), 8);
        assert_eq!(offset_of!(Cqe, sq_id), 10);
        assert_eq!(offset_of!(Cqe, cid), 12);
        assert_eq!(offset_of!(Cqe, status), 14);
    }

    #[test]
    fn phase_and_status_do_not_mix() {
        let status = Status::LBA_OUT_OF_RANGE.with_dnr();
        let cqe = Cqe::new(7, 1, 3, status, 0xdead_beef);
        assert!(!cqe.phase());
        assert_eq!(cqe.status(), status);
        let cqe = cqe.with_phase(true);
        assert!(cqe.phase());
        assert_eq!(cqe.status(), status);
        // In the status word, DNR is bit 15, and SC 80h is in bits 8:1.
        assert_eq!(cqe.as_bytes()[14..], [0x01, 0x81]);
        let cqe = cqe.with_status(Status::SUCCESS);
        assert!(cqe.phase());
        assert_eq!(cqe.status(), Status::SUCCESS);
        assert!(!cqe.with_phase(false).phase());
        assert_eq!(cqe.as_bytes()[..14], [0xef, 0xbe, 0xad, 0xde, 0, 0, 0, 0, 3, 0, 1, 0, 7, 0]);
    }
}
