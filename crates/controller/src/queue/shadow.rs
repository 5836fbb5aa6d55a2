//! Shadow doorbell entries: a queue's cells in the two buffers of Doorbell Buffer Config.

use shadowbell_memory::{DmaTable, SharedU32};

/// Cells of one doorbell: Shadow Doorbell and EventIdx entry.
#[derive(Clone, Debug)]
pub(crate) struct ShadowCells {
    pub(crate) value: SharedU32,
    pub(crate) event_idx: SharedU32,
}

impl ShadowCells {
    /// Resolves the entries at `offset` of the two pages, if both are mapped and writable.
    pub(crate) fn resolve(
        table: &DmaTable,
        (shadow, event_idx): (u64, u64),
        offset: u64,
    ) -> Option<Self> {
        let cell = |page: u64| table.bytes(page.checked_add(offset)?, 4)?.cell(0);
        Some(Self { value: cell(shadow)?, event_idx: cell(event_idx)? })
    }
}
