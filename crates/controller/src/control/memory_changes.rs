//! Changes of the host's memory map.

use super::Control;
use super::deferred::{Callback, Deferred};
use super::quiesce_state::Step;
use super::reset::Phase;
use crate::context::Context;
use crate::notice::{Latch, Notice};
use crate::worker::mailbox::Message;
use shadowbell_memory::{DmaError, DmaTable, SharedBytes};
use std::sync::Arc;

impl Control {
    /// Maps memory. The caller calls [`publish_table`](Self::publish_table) afterwards.
    pub(crate) fn map(
        &mut self,
        iova: u64,
        len: u64,
        memory: &SharedBytes,
    ) -> Result<(), DmaError> {
        self.memory.map(iova, len, memory)
    }

    /// Unmaps a range. `done` is called when the range is no longer used.
    pub(crate) fn unmap(
        &mut self,
        cx: &Context,
        iova: u64,
        len: u64,
        done: Callback,
    ) -> Result<Deferred, DmaError> {
        self.memory.unmap(iova, len)?;
        let mut deferred = Deferred::default();
        self.release_memory(cx, done, &mut deferred);
        Ok(deferred)
    }

    /// Unmaps all ranges. `done` is called when they are no longer used.
    pub(crate) fn unmap_all(&mut self, cx: &Context, done: Callback, deferred: &mut Deferred) {
        self.memory.unmap_all();
        self.release_memory(cx, done, deferred);
    }

    /// Enables access to host memory. The caller calls [`publish_table`](Self::publish_table)
    /// afterwards.
    pub(crate) fn enable_memory(&mut self) {
        self.memory.enable(true);
    }

    /// Disables access to host memory, independent of the maps. `done` is called when no memory is
    /// used any more.
    pub(crate) fn disable_memory(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.memory.enable(false);
        let mut deferred = Deferred::default();
        self.release_memory(cx, done, &mut deferred);
        deferred
    }

    /// DMA table of all maps, even while access is disabled.
    pub(crate) fn mapped(&self) -> &Arc<DmaTable> {
        self.memory.all()
    }

    pub(super) fn release_memory(&mut self, cx: &Context, done: Callback, deferred: &mut Deferred) {
        let ticket = self.memory.wait(done);
        let latch = cx.latch(Notice::MemoryReleased { ticket });
        self.publish_table(cx, Some(&latch));
        deferred.latches.push(latch);
    }

    /// Sends the current DMA table to the admin queue server and all I/O threads. Each drops its
    /// clone of `latch` when it no longer uses the old table.
    pub(crate) fn publish_table(&mut self, cx: &Context, latch: Option<&Latch>) {
        let table = Arc::clone(self.memory.table());
        // A disabled controller has no admin queue. During a reset the queue may still exist.
        let latch_of_admin = latch.filter(|_| self.lifecycle.phase != Phase::Disabled);
        self.port.change_table(&table, latch_of_admin);
        // A quiesced controller's queues use no memory, and messages are kept until the quiesce
        // ends, so the latch must not wait for them.
        let latch = latch.filter(|_| self.quiesce.step != Step::Quiesced);
        cx.send_all(self.queues.workers(), |controller| Message::Table {
            controller,
            table: Arc::clone(&table),
            latches: latch.into_iter().cloned().collect(),
        });
    }
}
