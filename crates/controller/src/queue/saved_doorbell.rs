//! Conversion of doorbell states to and from their serialized form.

use crate::saved::{SavedDoorbell, SavedTruth};
use shadowbell_doorbell::{DoorbellState, Truth};

/// Converts a doorbell state to its serialized form.
pub(super) fn save(state: DoorbellState) -> SavedDoorbell {
    let DoorbellState { last, truth, snapshot } = state;
    let truth = match truth {
        Truth::Register => SavedTruth::Register,
        Truth::Last => SavedTruth::Last,
        Truth::Shadow => SavedTruth::Shadow,
    };
    SavedDoorbell { last, truth, snapshot }
}

/// Converts a serialized doorbell state back.
pub(super) fn restore(saved: SavedDoorbell) -> DoorbellState {
    let SavedDoorbell { last, truth, snapshot } = saved;
    let truth = match truth {
        SavedTruth::Register => Truth::Register,
        SavedTruth::Last => Truth::Last,
        SavedTruth::Shadow => Truth::Shadow,
    };
    DoorbellState { last, truth, snapshot }
}
