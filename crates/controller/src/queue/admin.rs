//! The admin queue pair, served under the control plane's lock.

use super::{Cq, QueueLayout, ShadowCells, Sq};
use crate::interrupt::{HoldLimit, IrqLine};
use crate::shared::{ControllerShared, DSTRD};
use crate::stats::{CqStats, SqStats};
use shadowbell_doorbell::{InvalidDoorbell, RingSize, Sleeper};
use shadowbell_memory::{DmaTable, Fault};
use shadowbell_spec::dbbuf::{cq_entry_offset, sq_entry_offset};
use shadowbell_spec::regs::{Aqa, DoorbellKind};
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// The admin queue pair. It is always armed between two turns: commands are few, and nobody polls.
pub(crate) struct AdminQueue {
    sq: Sq,
    cq: Cq,
    /// The completion queue was never in memory that the host shared.
    acq_missing: bool,
    /// Nobody sleeps here, but arming goes through a sleeper's order: publish, fence, look again.
    sleeper: Sleeper<Arc<AtomicU32>>,
}

impl AdminQueue {
    /// The queues at `asq` and `acq`, of the sizes in `aqa`, which are at least 2.
    pub(crate) fn new(
        shared: &ControllerShared,
        table: &DmaTable,
        aqa: Aqa,
        asq: u64,
        acq: u64,
    ) -> Result<Self, Fault> {
        let size = |zero_based: u16| {
            RingSize::from_zero_based(zero_based).unwrap_or(RingSize::new(2).expect("2 is a size"))
        };
        let sq = QueueLayout { qid: 0, iova: asq, size: size(aqa.asqs()) };
        let cq = QueueLayout { qid: 0, iova: acq, size: size(aqa.acqs()) };
        let irq = IrqLine::new(Arc::clone(&shared.irqs), 0);
        let mut sq = Sq::new(sq, shared.register(0, DoorbellKind::Sq), 0);
        let mut cq = Cq::new(cq, shared.register(0, DoorbellKind::Cq), Some(irq), HoldLimit::NONE);
        sq.resolve(table)?;
        let acq_missing = cq.resolve(table).is_err();
        Ok(Self { sq, cq, acq_missing, sleeper: Sleeper::new(Arc::default()) })
    }

    /// Puts the completion queue elsewhere, as long as no command was fetched. Whether it was.
    ///
    /// ACQ has to be written before CC.EN; QEMU's `nvme://` driver, whose compiler knows nothing of
    /// that, writes it after, and lives with controllers that do not look before the first command.
    pub(crate) fn place_cq(&mut self, table: &DmaTable, acq: u64) -> bool {
        if self.sq.stats.commands != 0 {
            return false;
        }
        self.cq.layout.iova = acq;
        self.acq_missing = self.cq.resolve(table).is_err();
        true
    }

    /// Whether there is a command, and no completion queue yet.
    pub(crate) fn lacks_cq(&mut self) -> bool {
        self.acq_missing && self.sq.tail.look().is_ok_and(|tail| tail != self.sq.head)
    }

    pub(crate) fn enable_shadow(&mut self, table: &DmaTable, pages: (u64, u64)) {
        self.sq.shadow(ShadowCells::resolve(table, pages, sq_entry_offset(0, DSTRD)));
        self.cq.shadow(ShadowCells::resolve(table, pages, cq_entry_offset(0, DSTRD)));
    }

    pub(crate) fn drop_shadow(&mut self) {
        self.sq.shadow(None);
        self.cq.shadow(None);
    }

    /// Finds everything again in another DMA map. Whether the queues are within reach that were
    /// not.
    pub(crate) fn remap(&mut self, table: &DmaTable, pages: Option<(u64, u64)>) -> bool {
        let is_away = |queue: &Self| queue.sq.ring.is_none() || queue.cq.ring.is_none();
        let was_away = is_away(self);
        self.sq.remap(table, pages);
        self.cq.remap(table, pages);
        self.acq_missing &= self.cq.ring.is_none();
        was_away && !is_away(self)
    }

    /// The next command, if there is one and room for its completion.
    pub(crate) fn next(&mut self) -> Result<Option<Sqe>, InvalidDoorbell> {
        if self.sq.ring.is_none() || self.cq.ring.is_none() {
            return Ok(None);
        }
        let tail = self.sq.tail.look()?;
        if self.sq.head == tail {
            self.sq.blocked = false;
            return Ok(None);
        }
        if self.cq.free() == 0 {
            self.cq.look()?;
        }
        self.sq.blocked = self.cq.free() == 0;
        if self.sq.blocked {
            return Ok(None);
        }
        self.sq.stats.batches += 1;
        Ok(self.sq.fetch())
    }

    pub(crate) fn complete(&mut self, cid: u16, status: Status, dw0: u32) {
        self.cq.complete_unreserved(Cqe::new(cid, 0, self.sq.head, status, dw0));
    }

    /// Posts what is complete, as far as there is room, and raises the interrupt.
    pub(crate) fn post(&mut self, shared: &ControllerShared) {
        if self.cq.post() {
            self.cq.notify_host(&shared.coalescing);
        }
        // Nobody comes back to look after an interrupt that is held back.
        self.cq.flush_interrupts();
    }

    /// Arms the doorbells and looks once more: whether there is nothing to do.
    pub(crate) fn arm(&mut self) -> Result<bool, InvalidDoorbell> {
        let Self { sq, cq, sleeper, .. } = self;
        let wait_for_room = sq.blocked || cq.has_staged();
        let mut arming = sleeper.prepare();
        sq.tail.arm(&mut arming);
        if wait_for_room {
            cq.head.arm(&mut arming);
        }
        let mut fenced = arming.fence();
        let tail = sq.tail.recheck(&mut fenced);
        let head = if wait_for_room { cq.head.recheck(&mut fenced, cq.tail) } else { Ok(0) };
        let idle = fenced.try_sleep().is_some();
        tail?;
        head?;
        Ok(idle)
    }

    pub(crate) fn snapshot(&self, shared: &ControllerShared) -> (SqStats, CqStats) {
        (
            self.sq.snapshot(shared.traps(0, DoorbellKind::Sq)),
            self.cq.snapshot(shared.traps(0, DoorbellKind::Cq)),
        )
    }

    /// The queue is gone; its doorbell writes are not counted for the next one.
    pub(crate) fn retire(self, shared: &ControllerShared) {
        shared.take_traps(0, DoorbellKind::Sq);
        shared.take_traps(0, DoorbellKind::Cq);
    }
}
