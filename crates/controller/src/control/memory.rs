//! Host memory: DMA maps of the control plane.

use super::lifecycle_state::Callback;
use shadowbell_memory::{DirtyLog, DmaError, DmaSpace, DmaTable, SharedBytes};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Host memory of a controller, and callbacks that wait for the end of accesses to unmapped memory.
pub(super) struct HostMemory {
    space: DmaSpace,
    /// True if the controller may access host memory.
    enabled: bool,
    empty: Arc<DmaTable>,
    /// Shadow Doorbell and EventIdx pages of Doorbell Buffer Config.
    pub(super) shadow: Option<(u64, u64)>,
    /// Callbacks by ticket number.
    releases: BTreeMap<u64, Callback>,
    next_ticket: u64,
}

impl HostMemory {
    /// Creates host memory without maps. `peer` identifies the controller in reports of lost
    /// memory.
    pub(super) fn new(peer: u32) -> Self {
        Self {
            space: DmaSpace::of_peer(peer),
            enabled: true,
            empty: Arc::default(),
            shadow: None,
            releases: BTreeMap::new(),
            next_ticket: 0,
        }
    }

    /// DMA table that the controller may use now; empty while access is disabled.
    pub(super) fn table(&self) -> &Arc<DmaTable> {
        if self.enabled { self.space.table() } else { &self.empty }
    }

    /// DMA table of all maps, even while access is disabled.
    pub(super) fn all(&self) -> &Arc<DmaTable> {
        self.space.table()
    }

    pub(super) fn enable(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    pub(super) fn map(
        &mut self,
        iova: u64,
        len: u64,
        memory: &SharedBytes,
    ) -> Result<(), DmaError> {
        self.space.map(iova, len, memory)
    }

    pub(super) fn unmap(&mut self, iova: u64, len: u64) -> Result<(), DmaError> {
        self.space.unmap(iova, len)
    }

    pub(super) fn unmap_all(&mut self) {
        self.space.clear();
    }

    /// Enables or disables dirty page logging. The change takes effect with the next DMA table.
    /// Returns false if the setting is unchanged.
    pub(super) fn set_logged(&mut self, logged: bool) -> bool {
        if logged { self.space.start_log() } else { self.space.stop_log() }
    }

    /// Dirty page log, if enabled.
    pub(super) fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.space.log()
    }

    /// Stores `done` and returns its ticket for [`released`](Self::released).
    pub(super) fn wait(&mut self, done: Callback) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.releases.insert(ticket, done);
        ticket
    }

    /// Removes and returns the callback with this ticket number: no thread uses the unmapped memory
    /// any more.
    pub(super) fn released(&mut self, ticket: u64) -> Option<Callback> {
        self.releases.remove(&ticket)
    }

    /// True if a callback waits for unmapped memory.
    pub(super) fn is_awaited(&self) -> bool {
        !self.releases.is_empty()
    }

    /// True if the `page` bytes at `at` are valid as a page of Doorbell Buffer Config.
    pub(super) fn is_shadow_page(&self, at: u64, page: u64) -> bool {
        at.is_multiple_of(page)
            && self.table().bytes(at, page).is_some_and(|bytes| bytes.is_writable())
    }
}
