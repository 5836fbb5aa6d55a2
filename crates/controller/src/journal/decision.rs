//! What was decided of a command that is alone, in its record.
//!
//! It takes the place of two dwords of the entry that no such command has a use for.

use shadowbell_spec::Sqe;
use shadowbell_spec::status::Status;

/// What was decided of a command before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// It is the second of a fused operation, and is carried out.
    Begin,
    /// It is the first of a fused operation, and the disk is asked for both as one step.
    Try,
    /// It has ended like this. Of the second of a fused operation that was one step, `dw0` is the
    /// status of the first.
    End { status: Status, dw0: u32 },
}

/// Where the dwords are in a submission queue entry.
pub(super) const AT: usize = 8;
const BEGIN: u16 = 1;
const END: u16 = 2;
const TRY: u16 = 3;

impl Decision {
    pub(super) fn pack(self) -> u64 {
        match self {
            Self::Begin => u64::from(BEGIN),
            Self::Try => u64::from(TRY),
            Self::End { status, dw0 } => {
                u64::from(END) | u64::from(status.bits()) << 16 | u64::from(dw0) << 32
            }
        }
    }

    /// Of the entry in a record that says that something was decided.
    pub(super) fn unpack(sqe: &Sqe) -> Option<Self> {
        match sqe.cdw2 as u16 {
            BEGIN => Some(Self::Begin),
            TRY => Some(Self::Try),
            END => {
                let status = Status::from_bits((sqe.cdw2 >> 16) as u16);
                Some(Self::End { status, dw0: sqe.cdw3 })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn it_comes_back_from_the_entry() {
        let end = |status| Decision::End { status, dw0: 0x1234_5678 };
        let failed = end(Status::COMPARE_FAILURE.with_dnr());
        for decision in [Decision::Begin, Decision::Try, end(Status::SUCCESS), failed] {
            let mut bytes = Sqe::new(1, 2, 3).as_bytes().to_vec();
            bytes[AT..AT + 8].copy_from_slice(&decision.pack().to_le_bytes());
            let sqe = Sqe::read_from_bytes(&bytes).unwrap();
            assert_eq!((Decision::unpack(&sqe), sqe.opcode, sqe.nsid), (Some(decision), 1, 3));
        }
        assert_eq!(Decision::unpack(&Sqe::new(1, 2, 3)), None);
    }
}
