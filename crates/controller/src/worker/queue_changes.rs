//! Queue creation, deletion and remapping of queue memory.

use super::controller_queues::{ControllerQueues, Deleting, insert};
use crate::interrupt::{HoldLimit, IrqLine};
use crate::notice::Latch;
use crate::queue::{Cq, QueueLayout, ShadowCells, Sq};
use crate::shared::DSTRD;
use shadowbell_memory::{DmaTable, View};
use shadowbell_spec::dbbuf::{cq_entry_offset, sq_entry_offset};
use shadowbell_spec::status::Status;
use std::sync::Arc;

impl ControllerQueues {
    pub(super) fn shadow_cells(&self, offset: u64) -> Option<ShadowCells> {
        ShadowCells::resolve(&self.table(), self.shadow?, offset)
    }

    pub(crate) fn create_cq(&mut self, layout: QueueLayout, vector: Option<u16>, limit: HoldLimit) {
        let shared = &self.set.shared;
        let irq = vector.map(|v| IrqLine::new(Arc::clone(&shared.irqs), v));
        let mut cq = Cq::new(layout, shared, irq, limit);
        // The control plane refuses unmapped memory; if it was unmapped since, the queue waits.
        let _ = cq.resolve(&self.table());
        cq.shadow(self.shadow_cells(cq_entry_offset(layout.qid, DSTRD)));
        insert(&mut self.set.cqs, cq);
        self.write_down();
    }

    pub(crate) fn create_sq(&mut self, layout: QueueLayout, cqid: u16) -> Result<(), Status> {
        let cq = self.set.find_cq(cqid).ok_or(Status::CQ_INVALID.with_dnr())?;
        let mut sq = Sq::new(layout, &self.set.shared, cq);
        let _ = sq.resolve(&self.table());
        sq.shadow(self.shadow_cells(sq_entry_offset(layout.qid, DSTRD)));
        insert(&mut self.set.sqs, sq);
        self.write_down();
        Ok(())
    }

    /// Writes the state of all queues to the journal, after a queue or doorbell location has
    /// changed.
    pub(super) fn write_down(&self) {
        if let Some(journal) = &self.set.journal {
            for sq in self.set.sqs.iter().flatten() {
                let cq = self.set.cqs.get(sq.cq).and_then(Option::as_ref);
                sq.write_down(journal, cq.map_or(0, Cq::posted));
            }
            self.set.cqs.iter().flatten().for_each(|cq| cq.write_down(journal));
        }
    }

    pub(crate) fn delete_sq(&mut self, qid: u16, latch: Latch) {
        let Some(index) = self.set.find_sq(qid) else { return };
        if let Some(sq) = &mut self.set.sqs[index] {
            sq.stopped = true;
        }
        self.set.engine.cancel_all(Some(index));
        if let Some(overriding) = &mut self.overriding {
            overriding.delete_sq(&mut self.set, index);
        }
        self.deleting.push((Deleting::Sq(index), latch));
    }

    pub(crate) fn delete_cq(&mut self, qid: u16) {
        let index = self.set.find_cq(qid);
        if let Some(cq) = index.and_then(|i| self.set.cqs[i].take()) {
            self.set.shared.retire_cq(&cq.counters);
        }
    }

    /// Applies Doorbell Buffer Config: every queue gets its shadow entry, even with commands in
    /// flight. With `None`, a queue whose doorbells were in the buffer stops.
    pub(crate) fn change_shadow(&mut self, pages: Option<(u64, u64)>) {
        self.shadow = pages;
        let table = self.table();
        let cells = |offset| ShadowCells::resolve(&table, pages?, offset);
        for sq in self.set.sqs.iter_mut().flatten() {
            sq.shadow(cells(sq_entry_offset(sq.layout.qid, DSTRD)));
        }
        for cq in self.set.cqs.iter_mut().flatten() {
            cq.shadow(cells(cq_entry_offset(cq.layout.qid, DSTRD)));
        }
        self.write_down();
    }

    /// Replaces the DMA map. Queues are resolved in the new map; a queue that it does not contain
    /// stops until a later map contains it. Shadow doorbell state survives the remapping.
    pub(crate) fn change_table(&mut self, table: Arc<DmaTable>, latches: Vec<Latch>) {
        let old = self.set.engine.change_view(View::new(Arc::clone(&table)));
        self.lost = false;
        self.draining.push_back((old.watch(), latches));
        drop(old);
        let pages = self.shadow;
        self.set.sqs.iter_mut().flatten().for_each(|sq| sq.remap(&table, pages));
        self.set.cqs.iter_mut().flatten().for_each(|cq| cq.remap(&table, pages));
        self.write_down();
    }
}
