//! The host's memory, as the control plane has it mapped.

use super::deferred::Callback;
use shadowbell_memory::{DirtyLog, DmaError, DmaSpace, DmaTable, SharedBytes};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The host's memory, and who waits for the end of what was unmapped.
pub(super) struct HostMemory {
    space: DmaSpace,
    /// The controller may use it.
    enabled: bool,
    nothing: Arc<DmaTable>,
    /// The buffers of Doorbell Buffer Config: Shadow Doorbell and EventIdx.
    pub(super) shadow: Option<(u64, u64)>,
    /// By ticket.
    releases: BTreeMap<u64, Callback>,
    next_ticket: u64,
}

impl HostMemory {
    /// Nothing is mapped. `peer` names the controller, for memory that is lost.
    pub(super) fn new(peer: u32) -> Self {
        Self {
            space: DmaSpace::of_peer(peer),
            enabled: true,
            nothing: Arc::default(),
            shadow: None,
            releases: BTreeMap::new(),
            next_ticket: 0,
        }
    }

    /// What the controller may use now.
    pub(super) fn table(&self) -> &Arc<DmaTable> {
        if self.enabled { self.space.table() } else { &self.nothing }
    }

    /// What it may use if it may use memory at all.
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

    /// Has the pages noted that are written, from the next table on, or not. False if that is so.
    pub(super) fn set_logged(&mut self, logged: bool) -> bool {
        if logged { self.space.start_log() } else { self.space.stop_log() }
    }

    /// Where they are noted, if they are.
    pub(super) fn log(&self) -> Option<&Arc<DirtyLog>> {
        self.space.log()
    }

    /// Keeps `done` until [`released`](Self::released) is called with the ticket that this returns.
    pub(super) fn wait(&mut self, done: Callback) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.releases.insert(ticket, done);
        ticket
    }

    /// Who has waited with this ticket.
    pub(super) fn released(&mut self, ticket: u64) -> Option<Callback> {
        self.releases.remove(&ticket)
    }

    /// Whether anybody waits for the end of what was unmapped.
    pub(super) fn is_awaited(&self) -> bool {
        !self.releases.is_empty()
    }

    /// Whether `page` bytes at `at` can serve as a buffer of Doorbell Buffer Config.
    pub(super) fn is_shadow_page(&self, at: u64, page: u64) -> bool {
        at.is_multiple_of(page)
            && self.table().bytes(at, page).is_some_and(|bytes| bytes.is_writable())
    }
}
