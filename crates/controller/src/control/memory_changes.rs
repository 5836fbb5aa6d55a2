//! The host's memory, as it comes and goes.

use super::Control;
use super::deferred::{Callback, Deferred};
use super::reset::Phase;
use super::rest::Step;
use crate::context::Context;
use crate::latch::Latch;
use crate::notice::Notice;
use crate::worker::message::Message;
use shadowbell_memory::{DmaError, DmaTable, SharedBytes};
use std::sync::Arc;

impl Control {
    /// Maps memory; [`publish_table`](Self::publish_table) has to follow.
    pub(crate) fn map(
        &mut self,
        iova: u64,
        len: u64,
        memory: &SharedBytes,
    ) -> Result<(), DmaError> {
        self.memory.map(iova, len, memory)
    }

    /// Takes a range away; `done` is called when nothing uses it any more.
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

    /// Takes every range away; `done` is called when nothing uses them any more.
    pub(crate) fn unmap_all(&mut self, cx: &Context, done: Callback, deferred: &mut Deferred) {
        self.memory.unmap_all();
        self.release_memory(cx, done, deferred);
    }

    /// Lets the controller use the host's memory; [`publish_table`](Self::publish_table) has to
    /// follow.
    pub(crate) fn enable_memory(&mut self) {
        self.memory.enable(true);
    }

    /// Lets it use none, whatever is mapped; `done` is called when it does not any more.
    pub(crate) fn disable_memory(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.memory.enable(false);
        let mut deferred = Deferred::default();
        self.release_memory(cx, done, &mut deferred);
        deferred
    }

    /// Everything that is mapped.
    pub(crate) fn mapped(&self) -> &Arc<DmaTable> {
        self.memory.all()
    }

    pub(super) fn release_memory(&mut self, cx: &Context, done: Callback, deferred: &mut Deferred) {
        let ticket = self.memory.wait(done);
        let latch = cx.latch(Notice::MemoryReleased { ticket });
        self.publish_table(cx, Some(&latch));
        deferred.latches.push(latch);
    }

    /// Gives everybody the DMA map as it is now. `latch`, if somebody waits, is let go by each when
    /// nothing of it uses the old one any more.
    pub(crate) fn publish_table(&mut self, cx: &Context, latch: Option<&Latch>) {
        let table = Arc::clone(self.memory.table());
        // With the controller disabled, nobody has any. While a reset is under way, somebody may.
        let latch_of_admin = latch.filter(|_| self.lifecycle.phase != Phase::Disabled);
        self.port.change_table(&table, latch_of_admin);
        // At rest no queue uses any, and what is said now is heard when the rest has ended.
        let latch = latch.filter(|_| self.rest.step != Step::Resting);
        cx.send_all(self.queues.workers(), |controller| Message::Table {
            controller,
            table: Arc::clone(&table),
            latches: latch.into_iter().cloned().collect(),
        });
    }
}
