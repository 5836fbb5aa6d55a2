//! Encoding of queue positions and doorbell states as 64-bit words.

use shadowbell_doorbell::{DoorbellState, Truth};

/// Position of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// Index of the entry that is fetched next (submission queue) or posted next (completion
    /// queue).
    pub(crate) at: u16,
    /// The phase tag of the next completion.
    pub(crate) phase: bool,
    /// Number of commands fetched, modulo 2^32 (submission queue), or of completions posted,
    /// modulo 2^45 (completion queue).
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
        };
        u64::from(self.at) | truth << 16 | u64::from(self.phase) << 18 | self.count << 19
    }

    pub(super) fn unpack(word: u64) -> Self {
        let truth = match word >> 16 & 3 {
            0 => Truth::Register,
            1 => Truth::Last,
            _ => Truth::Shadow,
        };
        Self { at: word as u16, phase: word >> 18 & 1 != 0, count: word >> 19, truth }
    }
}

/// Encodes the number of completions posted when a submission queue's position `at` was stored.
pub(super) fn pack_covers(at: u16, completions: u64) -> u64 {
    u64::from(at) | completions << 19
}

/// True if completion number `nth` is among them and the stored position is `at`.
pub(super) fn covers(word: u64, at: u16, nth: u64) -> bool {
    // Completion numbers are modulo 2^45.
    word as u16 == at && ((word >> 19).wrapping_sub(nth) << 19) as i64 >= 0
}

/// Encodes the last value and the snapshot of a doorbell; `truth` is part of the position.
pub(super) fn pack_doorbell(state: DoorbellState) -> u64 {
    let snapshot = state.snapshot.map_or(0, |value| u64::from(value) | 1 << 48);
    snapshot | u64::from(state.last) << 32
}

pub(super) fn unpack_doorbell(word: u64, truth: Truth) -> DoorbellState {
    let snapshot = (word >> 48 & 1 != 0).then_some(word as u32);
    DoorbellState { last: (word >> 32) as u16, truth, snapshot }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_and_doorbells_come_back() {
        for truth in [Truth::Register, Truth::Last, Truth::Shadow] {
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
    fn a_position_covers_what_was_posted_before() {
        let most = (1 << 45) - 1;
        for count in [0, 1, 7, 1 << 44, most] {
            let word = pack_covers(9, count);
            assert!(covers(word, 9, count) && covers(word, 9, count.wrapping_sub(70_000)));
            assert!(!covers(word, 9, count + 1) && !covers(word, 9, count + 70_000));
            // The process died before it stored the position itself.
            assert!(!covers(word, 8, count));
        }
    }
}
