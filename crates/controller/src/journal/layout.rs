//! Layout of the journal file, and the encoding of its words: queue positions, doorbell states and
//! decisions about exclusive commands.
//!
//! A decision about an exclusive command is stored in its journal record, in two dwords of the
//! recorded submission queue entry that exclusive commands do not use.

use crate::saved::CauseOfDeath;
use shadowbell_doorbell::{DoorbellState, Truth};
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_spec::Sqe;
use shadowbell_spec::status::Status;
use std::io;
use std::os::fd::AsFd;

/// Bytes of the queue positions. Each queue identifier has a cache line of its own, because queues
/// of different I/O threads must not share one.
pub(super) const POSITIONS: usize = 8192;
pub(super) const LINE: usize = 64;
pub(super) const SQ: usize = 0;
pub(super) const SQ_DOORBELL: usize = 8;
pub(super) const CQ: usize = 16;
pub(super) const CQ_DOORBELL: usize = 24;
pub(super) const SQ_COVERS: usize = 32;
pub(super) const TRYING: usize = 40;
/// Maximum number of queue identifiers.
pub(crate) const QUEUES: usize = POSITIONS / LINE;

/// Size of a record in bytes: its key and the submission queue entry.
pub(super) const RECORD: usize = 8 + Sqe::SIZE;
/// Number of records beyond the request quota. The quota can be exceeded, because commands are
/// fetched in whole batches and long commands consist of several requests.
pub(super) const BEYOND_QUOTA: usize = 2048;

/// Maximum number of commands fetched from one queue before other queues get their turn: round
/// robin with a burst (Base 2.1, "Round Robin Arbitration"). The queue's position is stored after
/// each burst. So if a command without a record crashes the process, at most this many commands can
/// be the cause.
pub(crate) const BURST: u32 = 64;

/// Key flag: the record is valid.
pub(super) const VALID: u64 = 1 << 63;
/// Key flag: this process has not started the command yet.
pub(super) const WAITS: u64 = 1 << 47;
/// Key flag: the entry contains a decision about the command.
pub(super) const DECIDED: u64 = 1 << 46;
/// Position of the number of controller resets in the key.
pub(super) const GENERATION_SHIFT: u32 = 48;
/// Position of the crash count in the key: three bits that are free, because queue identifiers are
/// small.
const CRASHES_SHIFT: u32 = 40;
const MAX_CRASHES: u8 = 7;

/// Key of a record: command number `count` of queue `sqid` after `generation` controller resets.
pub(super) fn key(generation: u64, sqid: u16, count: u32) -> u64 {
    VALID | (generation & 0x7fff) << GENERATION_SHIFT | u64::from(sqid) << 32 | u64::from(count)
}

/// Key bits for the number of processes that have crashed with a command.
pub(super) fn pack_crashes(crashes: u8) -> u64 {
    u64::from(crashes.min(MAX_CRASHES)) << CRASHES_SHIFT
}

/// Decodes a key: queue, command number, number of crashes; `None` for a record of another
/// generation. `death` is the cause of death of the process that has written the key.
pub(super) fn unpack(found: u64, generation: u64, death: CauseOfDeath) -> Option<(u16, u32, u8)> {
    let (sqid, count) = ((found >> 32 & 0xff) as u16, found as u32);
    let crashes = (found >> CRASHES_SHIFT) as u8 & MAX_CRASHES;
    if found & !(WAITS | DECIDED) != key(generation, sqid, count) | pack_crashes(crashes) {
        return None;
    }
    // The dead process had started the command, unless WAITS is set.
    let had_it = found & WAITS == 0;
    let counts = had_it && death == CauseOfDeath::Fault;
    Some((sqid, count, (crashes + u8::from(counts)).min(MAX_CRASHES)))
}

/// Encodes the command that is being started, or waits for its start, and the number of processes
/// that have crashed with it.
pub(super) fn pack_trying(count: u32, crashes: u8, waits: bool) -> u64 {
    let waits = if waits { WAITS } else { 0 };
    VALID | waits | u64::from(crashes.min(MAX_CRASHES)) << 32 | u64::from(count)
}

/// Number of processes that have crashed with command `count`; `None` if the word describes another
/// command. `death` is the cause of death of the process that has written the word.
pub(super) fn unpack_trying(word: u64, count: u32, death: CauseOfDeath) -> Option<u8> {
    let counts = word & WAITS == 0 && death == CauseOfDeath::Fault;
    let crashes = (word >> 32) as u8 & MAX_CRASHES;
    (word & VALID != 0 && word as u32 == count).then_some(crashes + u8::from(counts))
}

/// Command that was fetched and not completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RecoveredCommand {
    pub(crate) sqid: u16,
    /// Number of commands that were fetched from the same queue before this command.
    pub(crate) count: u32,
    /// Number of consecutive processes that have crashed with the command in flight.
    pub(crate) crashes: u8,
    pub(crate) sqe: Sqe,
    /// Decision about the command, if any.
    pub(crate) decision: Option<Decision>,
}

pub(super) fn table_bytes(records: usize) -> usize {
    (records * RECORD).next_multiple_of(4096)
}

pub(super) fn map(file: &impl AsFd, offset: usize, len: usize) -> io::Result<SharedBytes> {
    let mapping = Mapping::from_fd(file, offset as u64, len as u64, Protection::ReadWrite);
    Ok(mapping.map_err(io::Error::other)?.bytes())
}

/// Position of a submission or completion queue, as stored in the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// Index of the entry that is fetched next (submission queue) or posted next (completion
    /// queue).
    pub(crate) at: u16,
    /// Phase tag of the next completion.
    pub(crate) phase: bool,
    /// Counter: commands fetched, modulo 2^32 (submission queue), or completions posted, modulo
    /// 2^45 (completion queue).
    pub(crate) count: u64,
    /// Source of the doorbell's value.
    pub(crate) truth: Truth,
}

impl Position {
    #[inline]
    pub(super) fn pack(self) -> u64 {
        let truth = match self.truth {
            Truth::Register => 0,
            Truth::Last => 1,
            Truth::Shadow => 2,
            Truth::Invalid => 3,
        };
        u64::from(self.at) | truth << 16 | u64::from(self.phase) << 18 | self.count << 19
    }

    pub(super) fn unpack(word: u64) -> Self {
        let truth = match word >> 16 & 3 {
            0 => Truth::Register,
            1 => Truth::Last,
            2 => Truth::Shadow,
            _ => Truth::Invalid,
        };
        Self { at: word as u16, phase: word >> 18 & 1 != 0, count: word >> 19, truth }
    }
}

/// Encodes the number of completions that were posted when position `at` of a submission queue was
/// stored.
pub(super) fn pack_covers(at: u16, completions: u64) -> u64 {
    u64::from(at) | completions << 19
}

/// True if `word` counts completion number `nth`, and the stored position is still `at`.
pub(super) fn covers(word: u64, at: u16, nth: u64) -> bool {
    // Completion numbers are modulo 2^45.
    word as u16 == at && ((word >> 19).wrapping_sub(nth) << 19) as i64 >= 0
}

/// Encodes the last value and the snapshot of a doorbell. (`truth` is part of the queue's
/// position.)
pub(super) fn pack_doorbell(state: DoorbellState) -> u64 {
    let snapshot = state.snapshot.map_or(0, |value| u64::from(value) | 1 << 48);
    snapshot | u64::from(state.last) << 32
}

pub(super) fn unpack_doorbell(word: u64, truth: Truth) -> DoorbellState {
    let snapshot = (word >> 48 & 1 != 0).then_some(word as u32);
    DoorbellState { last: (word >> 32) as u16, truth, snapshot }
}

/// Decision about an exclusive command, made before its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The Write of a fused operation is executed: its Compare was equal.
    Begin,
    /// The command is the first of a fused operation that is submitted as one disk request.
    Try,
    /// The command has ended with this status. If it is the second command of a fused operation
    /// that was one disk request, `dw0` is the status of the first command.
    End { status: Status, dw0: u32 },
}

/// Offset of the two dwords (CDW2, CDW3) in a submission queue entry.
pub(super) const DECISION_AT: usize = 8;
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
    fn positions_and_doorbells_are_decoded_as_encoded() {
        for truth in [Truth::Register, Truth::Last, Truth::Shadow, Truth::Invalid] {
            for (at, phase, count) in [(0, false, 0), (65535, true, (1 << 45) - 1), (7, true, 1)] {
                let position = Position { at, phase, count, truth };
                assert_eq!(Position::unpack(position.pack()), position);
            }
            for snapshot in [None, Some(0), Some(u32::MAX)] {
                let state = DoorbellState { last: 65535, truth, snapshot };
                assert_eq!(unpack_doorbell(pack_doorbell(state), truth), state);
            }
        }
    }

    #[test]
    fn a_position_covers_earlier_completions_only() {
        let most = (1 << 45) - 1;
        for count in [0, 1, 7, 1 << 44, most] {
            let word = pack_covers(9, count);
            assert!(covers(word, 9, count) && covers(word, 9, count.wrapping_sub(70_000)));
            assert!(!covers(word, 9, count + 1) && !covers(word, 9, count + 70_000));
            // The process died after it stored this word and before it stored the position itself.
            assert!(!covers(word, 8, count));
        }
    }

    #[test]
    fn a_decision_is_decoded_from_its_entry() {
        let end = |status| Decision::End { status, dw0: 0x1234_5678 };
        let failed = end(Status::COMPARE_FAILURE.with_dnr());
        for decision in [Decision::Begin, Decision::Try, end(Status::SUCCESS), failed] {
            let mut bytes = Sqe::new(1, 2, 3).as_bytes().to_vec();
            bytes[DECISION_AT..DECISION_AT + 8].copy_from_slice(&decision.pack().to_le_bytes());
            let sqe = Sqe::read_from_bytes(&bytes).unwrap();
            assert_eq!((Decision::unpack(&sqe), sqe.opcode, sqe.nsid), (Some(decision), 1, 3));
        }
        assert_eq!(Decision::unpack(&Sqe::new(1, 2, 3)), None);
    }
}
