//! A submission queue.

use super::layout::QueueLayout;
use super::saved_doorbell;
use super::shadow::ShadowCells;
use crate::journal::{JournalPart, Position};
use crate::saved::SavedSq;
use crate::shared::{ControllerShared, DSTRD};
use crate::stats::{CountedBy, SqCounters};
use shadowbell_doorbell::{DoorbellState, SqTail, Truth};
use shadowbell_memory::{DmaTable, Fault, Ring, SharedU32};
use shadowbell_spec::dbbuf::sq_entry_offset;
use shadowbell_spec::regs::DoorbellKind;
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use std::sync::Arc;

/// Of which waiting commands the disk has had a prefetch hint, counted from the head: of all before
/// the first number once, of all before the second number twice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PrefetchCursor {
    pub(crate) once: u32,
    pub(crate) twice: u32,
}

/// A submission queue.
#[derive(Debug)]
pub(crate) struct Sq {
    pub(crate) layout: QueueLayout,
    /// `None` while its memory is not mapped: it then stands still.
    pub(crate) ring: Option<Ring<{ Sqe::SIZE }>>,
    pub(crate) tail: SqTail<SharedU32, SharedU32, CountedBy<SqCounters>>,
    pub(crate) head: u16,
    /// Commands that were fetched, modulo 2^32. Counted on over a recovery.
    pub(crate) fetched: u32,
    /// Index of its completion queue in its owner's list.
    pub(crate) cq: usize,
    /// Fetched and not completed.
    pub(crate) in_flight: u32,
    /// Fetching stopped for want of completion queue space.
    pub(crate) blocked: bool,
    /// As above, and there has to be space for two completions.
    pub(crate) waits_for_two: bool,
    /// Being deleted: nothing more is fetched.
    pub(crate) stopped: bool,
    /// Commands are fetched one at a time, because one of them may have killed processes: not by
    /// whoever serves the other queues.
    pub(crate) careful: bool,
    pub(crate) prefetch: PrefetchCursor,
    /// Commands before this place are in the trace, or were there before it began.
    pub(crate) traced: u16,
    pub(crate) counters: Arc<SqCounters>,
}

impl Sq {
    pub(crate) fn new(layout: QueueLayout, shared: &ControllerShared, cq: usize) -> Self {
        let register = shared.register(layout.qid, DoorbellKind::Sq);
        Self::with_tail(layout, shared, cq, SqTail::new(layout.size, register))
    }

    fn with_tail(
        layout: QueueLayout,
        shared: &ControllerShared,
        cq: usize,
        tail: SqTail<SharedU32>,
    ) -> Self {
        let counters = shared.count_sq(layout.qid);
        Self {
            layout,
            ring: None,
            tail: tail.counted_by(CountedBy(Arc::clone(&counters))),
            head: 0,
            fetched: 0,
            cq,
            in_flight: 0,
            blocked: false,
            waits_for_two: false,
            stopped: false,
            careful: false,
            prefetch: PrefetchCursor::default(),
            traced: 0,
            counters,
        }
    }

    /// What has to be kept of it while nothing is in flight. `cqid` is its completion queue.
    pub(crate) fn save(&self, cqid: u16) -> SavedSq {
        let QueueLayout { qid, iova, size } = self.layout;
        let tail = saved_doorbell::save(self.tail.state());
        SavedSq { qid, iova, entries: size.entries(), cqid, head: self.head, tail }
    }

    /// The queue as it was, with its completion queue at `cq` of its owner's list. Its memory is
    /// found by [`remap`](Self::remap).
    pub(crate) fn restore(saved: &SavedSq, shared: &ControllerShared, cq: usize) -> Option<Self> {
        let layout = QueueLayout::restore(saved.qid, saved.iova, saved.entries)?;
        layout.size.position(u32::from(saved.head))?;
        let state = saved_doorbell::restore(saved.tail);
        let register = shared.register(saved.qid, DoorbellKind::Sq);
        let tail = SqTail::resume(layout.size, register, state)?;
        let (head, fetched) = (saved.head, u32::from(saved.head));
        Some(Self { head, fetched, traced: head, ..Self::with_tail(layout, shared, cq, tail) })
    }

    /// How far it is, for the journal.
    #[inline]
    pub(crate) fn position(&self) -> Position {
        let truth = self.tail.state().truth;
        Position { at: self.head, phase: false, count: u64::from(self.fetched), truth }
    }

    /// Writes down where it is: it has just begun, or its doorbell has another place.
    /// So many completions were posted to its completion queue.
    pub(crate) fn write_down(&self, journal: &JournalPart, completions: u64) {
        journal.store_sq_doorbell(self.layout.qid, self.tail.state());
        if !self.careful {
            journal.clear_trying(self.layout.qid);
        }
        journal.store_sq(self.layout.qid, self.position(), completions);
    }

    /// The queue as it was in a process that is dead: at `position`, with a doorbell of which this
    /// is known. Its memory is found by [`remap`](Self::remap).
    pub(crate) fn recover(
        saved: &SavedSq,
        shared: &ControllerShared,
        cq: usize,
        (position, doorbell): (Position, DoorbellState),
    ) -> Option<Self> {
        let layout = QueueLayout::restore(saved.qid, saved.iova, saved.entries)?;
        let head = layout.size.position(u32::from(position.at))?;
        // The last value that was seen is known only if there will be no other.
        let last = if doorbell.truth == Truth::Last { doorbell.last } else { head };
        let register = shared.register(saved.qid, DoorbellKind::Sq);
        let tail = SqTail::resume(layout.size, register, DoorbellState { last, ..doorbell })?;
        let fetched = position.count as u32;
        Some(Self { head, fetched, traced: head, ..Self::with_tail(layout, shared, cq, tail) })
    }

    /// A command that was in flight has ended: its completion.
    #[inline]
    pub(crate) fn complete(&mut self, cid: u16, status: Status, dw0: u32) -> Cqe {
        let status = match status.code() {
            // Nobody asked for that: the deletion of the queue ends it.
            Status::ABORT_REQUESTED if self.stopped => Status::ABORTED_SQ_DELETION,
            _ => status,
        };
        self.in_flight -= 1;
        Cqe::new(cid, self.layout.qid, self.head, status, dw0)
    }

    /// Finds the queue's memory in `table`.
    pub(crate) fn resolve(&mut self, table: &DmaTable) -> Result<(), Fault> {
        self.ring = None;
        let entries = self.layout.size.entries();
        self.ring = Some(Ring::resolve(table, self.layout.iova, entries, false)?);
        Ok(())
    }

    pub(crate) fn shadow(&mut self, cells: Option<ShadowCells>) {
        match cells {
            Some(cells) => self.tail.enable(cells.value, cells.event_idx),
            None => self.tail.disable(),
        }
    }

    /// Finds everything again in another DMA map. `pages` are the buffers of Doorbell Buffer
    /// Config. A queue of which anything is out of reach stands still until a map that has it.
    pub(crate) fn remap(&mut self, table: &DmaTable, pages: Option<(u64, u64)>) {
        let _ = self.resolve(table);
        self.tail.disable();
        let Some(pages) = pages else { return };
        let offset = sq_entry_offset(self.layout.qid, DSTRD);
        match ShadowCells::resolve(table, pages, offset) {
            Some(cells) => self.tail.reattach(cells.value, cells.event_idx),
            None => self.ring = None,
        }
    }

    /// The next entry. The caller knows that there is one (`head` is not the tail).
    pub(crate) fn fetch(&mut self) -> Option<Sqe> {
        let sqe = self.ring.as_ref()?.read(u32::from(self.head));
        self.head = self.layout.size.next(self.head);
        self.fetched = self.fetched.wrapping_add(1);
        self.counters.commands.add(1);
        Some(sqe)
    }
}
