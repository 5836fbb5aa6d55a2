//! Decision about an exclusive command, stored in its journal record.
//!
//! The decision occupies two dwords of the recorded entry that no exclusive command uses.

use shadowbell_spec::Sqe;
use shadowbell_spec::status::Status;

/// Decision about an exclusive command, made before its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The Write of a fused operation is executed: its Compare was equal.
    Begin,
    /// The fused operation, of which this is the first command, is submitted as one disk request.
    Try,
    /// The command has ended with this status. For the second command of a fused operation that
    /// was one disk request, `dw0` is the status of the first command.
    End { status: Status, dw0: u32 },
}

/// Offset of the two dwords (CDW2, CDW3) in a submission queue entry.
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

    /// Decodes the decision from a recorded entry with the flag `DECIDED`.
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
