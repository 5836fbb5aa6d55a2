//! Positions of queues, and what has to be kept of a doorbell, as words of memory.

use shadowbell_doorbell::{DoorbellState, Truth};

/// How far a queue is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    /// Of a submission queue: the entry that is fetched next. Of a completion queue: the one that
    /// is posted next.
    pub(crate) at: u16,
    /// The phase tag of the next completion.
    pub(crate) phase: bool,
    /// Commands that were fetched, modulo 2^32.
    pub(crate) count: u32,
    /// Where the doorbell's value is to be found.
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
        u64::from(self.at) | truth << 16 | u64::from(self.phase) << 18 | u64::from(self.count) << 32
    }

    pub(super) fn unpack(word: u64) -> Self {
        let truth = match word >> 16 & 3 {
            0 => Truth::Register,
            1 => Truth::Last,
            _ => Truth::Shadow,
        };
        Self { at: word as u16, phase: word >> 18 & 1 != 0, count: (word >> 32) as u32, truth }
    }
}

/// The last value and the snapshot: what there is of a doorbell beside the truth.
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
            for (at, phase, count) in [(0, false, 0), (65535, true, u32::MAX), (7, true, 1)] {
                let position = Position { at, phase, count, truth };
                assert_eq!(Position::unpack(position.pack()), position);
            }
            for snapshot in [None, Some(0), Some(u32::MAX)] {
                let state = DoorbellState { last: 65535, truth, snapshot };
                assert_eq!(unpack_doorbell(pack_doorbell(state), truth), state);
            }
        }
    }
}
