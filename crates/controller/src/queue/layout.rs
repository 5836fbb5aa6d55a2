//! Location of a queue and of its shadow doorbells in the host's memory, and serialization of
//! doorbell states.

use crate::saved::{SavedDoorbell, SavedTruth};
use crate::shared::MAX_QUEUES;
use shadowbell_doorbell::{DoorbellState, RingSize, Truth};
use shadowbell_memory::{DmaTable, SharedU32};

/// Location and size of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueLayout {
    pub(crate) qid: u16,
    pub(crate) iova: u64,
    pub(crate) size: RingSize,
}

impl QueueLayout {
    /// Layout of a saved queue; `None` if it is invalid.
    pub(crate) fn restore(qid: u16, iova: u64, entries: u32) -> Option<Self> {
        let is_possible = usize::from(qid) < MAX_QUEUES;
        is_possible.then_some(Self { qid, iova, size: RingSize::new(entries)? })
    }
}

/// Cells of one doorbell: its entries in the Shadow Doorbell and EventIdx buffers.
#[derive(Clone, Debug)]
pub(crate) struct ShadowCells {
    pub(crate) value: SharedU32,
    pub(crate) event_idx: SharedU32,
}

impl ShadowCells {
    /// Resolves the entries at `offset` of the two pages. `None` unless both are mapped and
    /// writable.
    pub(crate) fn resolve(
        table: &DmaTable,
        (shadow, event_idx): (u64, u64),
        offset: u64,
    ) -> Option<Self> {
        let cell = |page: u64| table.bytes(page.checked_add(offset)?, 4)?.cell(0);
        Some(Self { value: cell(shadow)?, event_idx: cell(event_idx)? })
    }
}

/// Converts a doorbell state to its serialized form.
pub(super) fn save_doorbell(state: DoorbellState) -> SavedDoorbell {
    let DoorbellState { last, truth, snapshot } = state;
    let truth = match truth {
        Truth::Register => SavedTruth::Register,
        Truth::Last => SavedTruth::Last,
        Truth::Shadow => SavedTruth::Shadow,
        Truth::Invalid => SavedTruth::Invalid,
    };
    SavedDoorbell { last, truth, snapshot }
}

/// Converts the serialized form to a doorbell state.
pub(super) fn restore_doorbell(saved: SavedDoorbell) -> DoorbellState {
    let SavedDoorbell { last, truth, snapshot } = saved;
    let truth = match truth {
        SavedTruth::Register => Truth::Register,
        SavedTruth::Last => Truth::Last,
        SavedTruth::Shadow => Truth::Shadow,
        SavedTruth::Invalid => Truth::Invalid,
    };
    DoorbellState { last, truth, snapshot }
}
