//! Submission queue.

use super::layout::{QueueLayout, ShadowCells, restore_doorbell, save_doorbell};
use crate::journal::{JournalPart, Position};
use crate::saved::SavedSq;
use crate::shared::{ControllerShared, DSTRD};
use crate::stats::{CountedBy, SqCounters};
use shadowbell_doorbell::{Cell, DoorbellState, Fence, Fenced, InvalidDoorbell, SqTail, Truth};
use shadowbell_memory::{DmaTable, Fault, Ring, SharedU32};
use shadowbell_spec::dbbuf::sq_entry_offset;
use shadowbell_spec::regs::DoorbellKind;
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use std::sync::Arc;

/// Prefetch hints of waiting commands, counted from the head: the first `twice` commands have had
/// two hints, the other commands of the first `once` have had one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PrefetchCursor {
    pub(crate) once: u32,
    pub(crate) twice: u32,
}

/// Submission queue.
#[derive(Debug)]
pub(crate) struct Sq {
    pub(crate) layout: QueueLayout,
    /// `None` while the queue's memory is not mapped, and after an invalid tail: no commands are
    /// fetched.
    pub(crate) ring: Option<Ring<{ Sqe::SIZE }>>,
    pub(crate) tail: SqTail<SharedU32, SharedU32, CountedBy<SqCounters>>,
    pub(crate) head: u16,
    /// Number of commands fetched, modulo 2^32. The count continues across crash recovery.
    pub(crate) fetched: u32,
    /// Index of the completion queue in the queue set.
    pub(crate) cq: usize,
    /// Number of commands fetched and not completed.
    pub(crate) in_flight: u32,
    /// True if fetching waits for room in the completion queue.
    pub(crate) blocked: bool,
    /// True if fetching waits for room for two completions, because the next two commands are a
    /// fused operation.
    pub(crate) waits_for_two: bool,
    /// True if the queue is being deleted: no commands are fetched.
    pub(crate) stopped: bool,
    /// True if the recovery fetches the queue's commands one at a time, because one of them may
    /// have crashed the process. The normal fetch skips the queue.
    pub(crate) careful: bool,
    pub(crate) prefetch: PrefetchCursor,
    /// Position up to which commands are recorded in the trace or were in the queue before its
    /// start.
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
        shared.set_sq_size(layout.qid, layout.size);
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

    /// Serializes the queue while no command is in flight. `cqid` is the identifier of its
    /// completion queue.
    pub(crate) fn save(&self, cqid: u16) -> SavedSq {
        let QueueLayout { qid, iova, size } = self.layout;
        let tail = save_doorbell(self.tail.state());
        SavedSq { qid, iova, entries: size.entries(), cqid, head: self.head, tail }
    }

    /// Restores a saved queue. `cq` is the index of its completion queue in the queue set.
    /// [`remap`](Self::remap) resolves its memory.
    pub(crate) fn restore(saved: &SavedSq, shared: &ControllerShared, cq: usize) -> Option<Self> {
        let layout = QueueLayout::restore(saved.qid, saved.iova, saved.entries)?;
        layout.size.position(u32::from(saved.head))?;
        let state = restore_doorbell(saved.tail);
        let register = shared.register(saved.qid, DoorbellKind::Sq);
        let tail = SqTail::resume(layout.size, register, state)?;
        let (head, fetched) = (saved.head, u32::from(saved.head));
        Some(Self { head, fetched, traced: head, ..Self::with_tail(layout, shared, cq, tail) })
    }

    /// Position for the journal.
    #[inline]
    pub(crate) fn position(&self) -> Position {
        let truth = self.tail.state().truth;
        Position { at: self.head, phase: false, count: u64::from(self.fetched), truth }
    }

    /// Writes the queue's state to the journal. Called when the queue was created or the location
    /// of its doorbell has changed. `completions` is the number of completions posted to its
    /// completion queue.
    pub(crate) fn write_down(&self, journal: &JournalPart, completions: u64) {
        journal.store_sq_doorbell(self.layout.qid, self.tail.state());
        if !self.careful {
            journal.clear_trying(self.layout.qid);
        }
        journal.store_sq(self.layout.qid, self.position(), completions);
    }

    /// Restores the queue of a dead process at `position`, with the journal's state of its
    /// doorbell. [`remap`](Self::remap) resolves its memory.
    pub(crate) fn recover(
        saved: &SavedSq,
        shared: &ControllerShared,
        cq: usize,
        (position, doorbell): (Position, DoorbellState),
    ) -> Option<Self> {
        let layout = QueueLayout::restore(saved.qid, saved.iova, saved.entries)?;
        let head = layout.size.position(u32::from(position.at))?;
        // If the doorbell's source is not the last value (`Truth::Last`), the value in the journal
        // may be older than the doorbell, so the head is used.
        let last = if doorbell.truth == Truth::Last { doorbell.last } else { head };
        let register = shared.register(saved.qid, DoorbellKind::Sq);
        let tail = SqTail::resume(layout.size, register, DoorbellState { last, ..doorbell })?;
        let fetched = position.count as u32;
        Some(Self { head, fetched, traced: head, ..Self::with_tail(layout, shared, cq, tail) })
    }

    /// Ends a command in flight and returns its completion.
    #[inline]
    pub(crate) fn complete(&mut self, cid: u16, status: Status, dw0: u32) -> Cqe {
        let status = match status.code() {
            // The command was aborted by the deletion of the queue, and not by an Abort command.
            Status::ABORT_REQUESTED if self.stopped => Status::ABORTED_SQ_DELETION,
            _ => status,
        };
        self.in_flight -= 1;
        Cqe::new(cid, self.layout.qid, self.head, status, dw0)
    }

    /// Resolves the queue's memory in `table`. A queue whose tail was invalid gets no memory.
    pub(crate) fn resolve(&mut self, table: &DmaTable) -> Result<(), Fault> {
        self.ring = None;
        if self.tail.state().truth == Truth::Invalid {
            return Ok(());
        }
        let entries = self.layout.size.entries();
        self.ring = Some(Ring::resolve(table, self.layout.iova, entries, false)?);
        Ok(())
    }

    /// Reads the host's tail. After an invalid tail, no command is taken from the queue.
    #[inline(always)]
    pub(crate) fn poll_tail(&mut self) -> Result<u16, InvalidDoorbell> {
        self.tail.poll().inspect_err(|_| self.ring = None)
    }

    /// Reads the host's tail before a sleep, like [`poll_tail`](Self::poll_tail).
    pub(crate) fn recheck_tail<T: Cell, F: Fence>(
        &mut self,
        fenced: &mut Fenced<'_, T, F>,
    ) -> Result<u16, InvalidDoorbell> {
        self.tail.recheck(fenced).inspect_err(|_| self.ring = None)
    }

    /// Replaces the shadow doorbell. Fails if the tail in the old shadow doorbell is invalid.
    pub(crate) fn shadow(&mut self, cells: Option<ShadowCells>) -> Result<(), InvalidDoorbell> {
        let Some(cells) = cells else {
            self.tail.disable();
            return Ok(());
        };
        self.tail.enable(cells.value, cells.event_idx).inspect_err(|_| self.ring = None)
    }

    /// Resolves the queue and its doorbell in another DMA map. `pages` are the buffers of Doorbell
    /// Buffer Config. If a part is not mapped, the queue stops until a later map contains it.
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

    /// Fetches the next entry. The caller has checked that there is one (the head differs from the
    /// tail).
    pub(crate) fn fetch(&mut self) -> Option<Sqe> {
        let sqe = self.ring.as_ref()?.read(u32::from(self.head));
        self.head = self.layout.size.next(self.head);
        self.fetched = self.fetched.wrapping_add(1);
        self.counters.commands.add(1);
        Some(sqe)
    }
}
