//! Completion queue and its interrupt.

use super::layout::{QueueLayout, ShadowCells, restore_doorbell, save_doorbell};
use crate::interrupt::{Coalescing, Decision, HoldLimit, InterruptPolicy, IrqLine};
use crate::journal::{JournalPart, Position, Records};
use crate::saved::SavedCq;
use crate::shared::{ControllerShared, DSTRD, Heads};
use crate::stats::{CountedBy, CqCounters};
use shadowbell_doorbell::{CqHead, DoorbellState, InvalidDoorbell, Truth};
use shadowbell_memory::{DmaTable, Fault, Ring, SharedU32, sigbus};
use shadowbell_spec::Cqe;
use shadowbell_spec::dbbuf::cq_entry_offset;
use shadowbell_spec::regs::DoorbellKind;
use shadowbell_spec::status::Status;
use shadowbell_state::{WrongOrder, is_wrong};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Completions per cache line.
const PER_LINE: u32 = 4;

/// Value of `Cq::faults` after a loss of host memory. [`sigbus::faults`] never reaches it.
const MEMORY_LOST: u64 = u64::MAX;
/// Status of commands of a host whose memory was lost.
pub(crate) const MEMORY_LOST_STATUS: Status = Status::DATA_XFER_ERROR;

/// Reservation of one completion queue entry. A command is fetched only with a permit, so there is
/// always room for its completion. The permit is returned with the completion ([`Cq::complete`]) or
/// without one ([`Cq::release`]).
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the entry stays reserved until `Cq::complete` or `Cq::release`"]
pub(crate) struct Permit(());

#[cfg(test)]
impl Permit {
    /// Creates a permit that belongs to no queue.
    pub(crate) fn detached() -> Self {
        Self(())
    }
}

/// Permits for a batch of commands.
#[derive(Debug)]
#[must_use = "every permit has to be taken or given back"]
pub(crate) struct Permits(u32);

impl Permits {
    /// Takes one permit.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Permit {
        debug_assert!(self.0 != 0, "one permit was reserved per command");
        self.0 = self.0.wrapping_sub(1);
        Permit(())
    }
}

/// Completion queue with its interrupt.
#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) layout: QueueLayout,
    /// `None` while the queue's memory is not mapped: completions stay in `staged`.
    pub(crate) ring: Option<Ring<{ Cqe::SIZE }>>,
    pub(crate) head: CqHead<SharedU32, SharedU32, CountedBy<CqCounters>>,
    pub(crate) tail: u16,
    /// Phase tag of the next entry.
    pub(crate) phase: bool,
    /// Number of reserved entries that are not written yet: permits and staged completions.
    reserved: u32,
    /// Completions of the current batch. They are written together, because the host polls the
    /// cache lines that they are written to.
    staged: Vec<[u64; 2]>,
    /// Journal records to free once their completions are posted. Each element belongs to a
    /// command: the total number of completions that are posted before its own, and the slot of its
    /// record.
    recorded: VecDeque<(u64, u32)>,
    /// Record table that `recorded` refers to while the queue moves between two I/O threads.
    recorded_in: Option<Records>,
    /// Number of completions posted since the head was last read.
    unlooked: u32,
    /// Invalid head that has not been reported yet.
    invalid: Option<InvalidDoorbell>,
    /// [`sigbus::faults`] at the last check of the host's memory, or [`MEMORY_LOST`].
    faults: u64,
    /// [`sigbus::losses`] at the last check of the host's memory.
    losses: u64,
    /// Identifier of the controller, under which [`sigbus`] counts losses of host memory.
    controller: u32,
    /// Position up to which completions are recorded in the trace or were posted before its start.
    pub(crate) traced: u16,
    interrupt: InterruptPolicy,
    pub(crate) counters: Arc<CqCounters>,
}

impl Cq {
    pub(crate) fn new(
        layout: QueueLayout,
        shared: &ControllerShared,
        irq: Option<IrqLine>,
        limit: HoldLimit,
    ) -> Self {
        let register = shared.register(layout.qid, DoorbellKind::Cq);
        Self::with_head(layout, shared, (irq, limit), CqHead::new(layout.size, register))
    }

    fn with_head(
        layout: QueueLayout,
        shared: &ControllerShared,
        (irq, limit): (Option<IrqLine>, HoldLimit),
        head: CqHead<SharedU32>,
    ) -> Self {
        let counters = shared.count_cq(layout.qid);
        shared.set_heads(layout.qid, Heads::new(layout.size, 0, &counters));
        Self {
            layout,
            ring: None,
            head: head.counted_by(CountedBy(Arc::clone(&counters))),
            tail: 0,
            phase: true,
            reserved: 0,
            staged: Vec::with_capacity(64),
            recorded: VecDeque::new(),
            recorded_in: None,
            unlooked: 0,
            invalid: None,
            // With 0, the first check also finds memory of the current map that was lost earlier.
            faults: 0,
            losses: 0,
            controller: shared.id,
            traced: 0,
            interrupt: InterruptPolicy::new(irq, limit),
            counters,
        }
    }

    /// Serializes the queue while no command is in flight.
    pub(crate) fn save(&self) -> SavedCq {
        let QueueLayout { qid, iova, size } = self.layout;
        SavedCq {
            qid,
            iova,
            entries: size.entries(),
            vector: self.interrupt.vector(),
            tail: self.tail,
            phase: self.phase,
            head: save_doorbell(self.head.state()),
            staged: self.staged.iter().map(|&[low, high]| (low, high)).collect(),
        }
    }

    /// Restores a saved queue. `irq` is the interrupt line of its vector. The caller must then call
    /// [`remap`](Self::remap), which resolves the queue's memory. The interrupt for the unread
    /// completions may or may not have been raised.
    pub(crate) fn restore(
        saved: &SavedCq,
        shared: &ControllerShared,
        irq: Option<IrqLine>,
        limit: HoldLimit,
    ) -> Option<Self> {
        let layout = QueueLayout::restore(saved.qid, saved.iova, saved.entries)?;
        layout.size.position(u32::from(saved.tail))?;
        let state = restore_doorbell(saved.head);
        let register = shared.register(saved.qid, DoorbellKind::Cq);
        let head = CqHead::resume(layout.size, register, state)?;
        let staged: Vec<_> = saved.staged.iter().map(|&(low, high)| [low, high]).collect();
        let reserved = u32::try_from(staged.len()).ok()?;
        let (tail, phase) = (saved.tail, saved.phase);
        let new = Self::with_head(layout, shared, (irq, limit), head);
        shared.set_heads(layout.qid, Heads::new(layout.size, tail, &new.counters));
        Some(Self { tail, traced: tail, phase, reserved, staged, ..new })
    }

    pub(crate) fn resolve(&mut self, table: &DmaTable) -> Result<(), Fault> {
        self.ring = None;
        let entries = self.layout.size.entries();
        self.ring = Some(Ring::resolve(table, self.layout.iova, entries, true)?);
        Ok(())
    }

    /// Replaces the shadow doorbell. Fails if the head in the old shadow doorbell is invalid.
    pub(crate) fn shadow(&mut self, cells: Option<ShadowCells>) -> Result<(), InvalidDoorbell> {
        let Some(cells) = cells else {
            self.head.disable();
            return Ok(());
        };
        let before = self.head.last();
        let outcome = self.head.enable(cells.value, cells.event_idx, self.tail);
        self.moved_from(before);
        outcome
    }

    /// Resolves the queue and its doorbell in another DMA map, like
    /// [`Sq::remap`](super::Sq::remap).
    pub(crate) fn remap(&mut self, table: &DmaTable, pages: Option<(u64, u64)>) {
        if !self.has_lost_memory() {
            // Memory of the new map may have been lost while the old map was in use.
            (self.faults, self.losses) = (0, 0);
        }
        let _ = self.resolve(table);
        self.head.disable();
        let Some(pages) = pages else { return };
        let offset = cq_entry_offset(self.layout.qid, DSTRD);
        match ShadowCells::resolve(table, pages, offset) {
            Some(cells) => self.head.reattach(cells.value, cells.event_idx),
            None => self.ring = None,
        }
    }

    /// Number of entries that can be reserved, according to the last read of the head.
    #[inline]
    pub(crate) fn free(&self) -> u32 {
        let size = self.layout.size;
        (size.entries() - 1)
            .saturating_sub(size.distance(self.head.last(), self.tail))
            .saturating_sub(self.reserved)
    }

    /// Reserves `count` entries, at most as many as are [free](Self::free).
    #[inline(always)]
    pub(crate) fn reserve(&mut self, count: u32) -> Permits {
        debug_assert!(count <= self.free(), "only free entries are reserved");
        self.reserved += count;
        Permits(count)
    }

    /// Returns unused permits; `left` is their number.
    #[inline(always)]
    pub(crate) fn return_permits(&mut self, permits: Permits, left: u32) {
        debug_assert_eq!(permits.0, left, "the number of unused permits");
        self.reserved -= left;
    }

    /// Reserves one entry, if one is free.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    pub(crate) fn try_reserve(&mut self) -> Option<Permit> {
        (self.free() != 0).then(|| self.reserve(1).take())
    }

    /// Returns a permit without using the reserved entry: the command gets no completion, or a
    /// completion without a reserved entry.
    pub(crate) fn release(&mut self, permit: Permit) {
        let Permit(()) = permit;
        self.reserved -= 1;
    }

    /// Stages a completion. Its phase tag is set when it is posted.
    #[inline]
    pub(crate) fn complete(&mut self, permit: Permit, cqe: Cqe) {
        let Permit(()) = permit;
        self.staged.push(zerocopy::transmute!(cqe));
    }

    /// Registers the journal record in slot `place`. The caller must stage the completion of the
    /// record's command next.
    pub(crate) fn complete_record(&mut self, place: u32) {
        self.recorded.push_back((self.posted() + self.staged.len() as u64, place));
    }

    /// Frees the journal records of commands whose completions are posted.
    #[inline]
    pub(crate) fn free_records(&mut self, journal: &mut JournalPart) {
        let mut posted = self.posted();
        if is_wrong(WrongOrder::FreedBeforePosted) {
            posted += self.staged.len() as u64;
        }
        while let Some((_, place)) = self.recorded.pop_front_if(|record| record.0 < posted) {
            journal.free(place);
        }
    }

    /// Prepares a move to an I/O thread that writes another journal part.
    pub(crate) fn detach_journal(&mut self, journal: &JournalPart) {
        self.recorded_in = Some(journal.records());
    }

    /// Moves the queue's records into the journal part of the new I/O thread.
    pub(crate) fn join_journal(&mut self, journal: &mut JournalPart) {
        let Some(records) = self.recorded_in.take() else { return };
        for (_, place) in &mut self.recorded {
            if let Some(here) = journal.adopt(&records, *place) {
                *place = here;
            }
        }
    }

    /// Number of completions posted so far.
    #[inline]
    pub(crate) fn posted(&self) -> u64 {
        self.counters.completions.get()
    }

    /// Interrupt vector, if any.
    pub(crate) fn vector(&self) -> Option<u16> {
        self.interrupt.vector()
    }

    /// Position for the journal.
    #[inline]
    pub(crate) fn position(&self) -> Position {
        let truth = self.head.state().truth;
        Position { at: self.tail, phase: self.phase, count: self.posted(), truth }
    }

    /// Writes the queue's state to the journal. Called when the queue was created or the location
    /// of its doorbell has changed.
    pub(crate) fn write_down(&self, journal: &JournalPart) {
        journal.store_cq_doorbell(self.layout.qid, self.head.state());
        journal.store_cq(self.layout.qid, self.position());
    }

    /// Restores the queue of a dead process at `position`, with the journal's state of its
    /// doorbell. `irq` is the line of its vector. The queue is resolved in `table`, and the caller
    /// calls [`remap`](Self::remap) afterwards. Calls `found` with each completion that the dead
    /// process had posted after `position`, and with the number of the completion.
    pub(crate) fn recover(
        saved: &SavedCq,
        shared: &ControllerShared,
        (irq, limit): (Option<IrqLine>, HoldLimit),
        (position, doorbell): (Position, DoorbellState),
        table: &DmaTable,
        found: impl FnMut(Cqe, u64),
    ) -> Option<Self> {
        let layout = QueueLayout::restore(saved.qid, saved.iova, saved.entries)?;
        let mut cq = Self::new(layout, shared, irq, limit);
        cq.tail = layout.size.position(u32::from(position.at))?;
        cq.phase = position.phase;
        let _ = cq.resolve(table);
        cq.find_posted(position.count, found);
        cq.traced = cq.tail;
        // The host's real head is unknown. The queue is assumed to be full, because then every
        // value of the doorbell is valid.
        let full = layout.size.next(cq.tail);
        let last = if doorbell.truth == Truth::Last { doorbell.last } else { full };
        let register = shared.register(saved.qid, DoorbellKind::Cq);
        let head = CqHead::resume(layout.size, register, DoorbellState { last, ..doorbell })?;
        cq.head = head.counted_by(CountedBy(Arc::clone(&cq.counters)));
        shared.set_heads(layout.qid, Heads::new(layout.size, cq.tail, &cq.counters));
        Some(cq)
    }

    fn find_posted(&mut self, before: u64, mut found: impl FnMut(Cqe, u64)) {
        let size = self.layout.size;
        for nth in 1..u64::from(size.entries()) {
            let Some(ring) = &self.ring else { return };
            let cqe: Cqe = ring.read(u32::from(self.tail));
            if cqe.phase() != self.phase {
                return;
            }
            self.tail = size.next(self.tail);
            if self.tail == 0 {
                self.phase = !self.phase;
            }
            found(cqe, before.wrapping_add(nth));
        }
    }

    /// Stages a completion without a reserved entry. The completion may have to wait for room. Used
    /// for admin commands: an Asynchronous Event Request would otherwise occupy an entry forever.
    pub(crate) fn complete_unreserved(&mut self, cqe: Cqe) {
        self.reserved += 1;
        self.staged.push(zerocopy::transmute!(cqe));
    }

    /// Reads the host's head. An invalid head is reported later, by
    /// [`take_invalid`](Self::take_invalid).
    #[inline]
    pub(crate) fn poll_head(&mut self) {
        let before = self.head.last();
        self.unlooked = 0;
        if let Err(error) = self.head.poll(self.tail) {
            self.invalid = Some(error);
        }
        self.moved_from(before);
    }

    /// Invalid head that was found since the last call.
    #[inline]
    pub(crate) fn take_invalid(&mut self) -> Option<InvalidDoorbell> {
        self.invalid.take()
    }

    /// Records that the head may have moved from `before`. Called after every read of the head.
    #[inline]
    pub(crate) fn moved_from(&mut self, before: u16) {
        self.interrupt.consumed(self.layout.size.distance(before, self.head.last()));
    }

    /// Prefetches the entries of the next `count` completions, up to two cache lines.
    #[inline]
    pub(crate) fn prefetch(&self, count: u32) {
        let Some(ring) = &self.ring else { return };
        let tail = u32::from(self.tail);
        ring.prefetch_for_write(tail);
        if count > PER_LINE {
            ring.prefetch_for_write(tail + PER_LINE);
        }
    }

    /// Records that the host has submitted commands which complete in this queue.
    #[inline]
    pub(crate) fn submitted(&mut self) {
        self.interrupt.submitted();
    }

    /// True if completions are staged.
    #[inline]
    pub(crate) fn has_staged(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Checks for lost memory of the host (see [`sigbus`]) before completions are posted. After a
    /// loss in the DMA map `table`, no command reports success, because its data may be missing.
    /// Without a fault in any host's memory, the check is one load.
    #[inline(always)]
    pub(crate) fn check_memory<'a>(&mut self, table: impl FnOnce() -> &'a DmaTable) {
        if sigbus::faults() != self.faults {
            self.find_lost_memory(table());
        }
    }

    #[cold]
    fn find_lost_memory(&mut self, table: &DmaTable) {
        if !self.has_lost_memory() {
            self.faults = sigbus::faults();
            let losses = sigbus::losses(self.controller);
            if std::mem::replace(&mut self.losses, losses) == losses || !table.is_poisoned() {
                return;
            }
            self.faults = MEMORY_LOST;
        }
        for staged in &mut self.staged {
            let cqe: Cqe = zerocopy::transmute!(*staged);
            if cqe.status().is_success() {
                let (cid, qid, head) = (cqe.cid, cqe.sq_id, cqe.sq_head);
                *staged = zerocopy::transmute!(Cqe::new(cid, qid, head, MEMORY_LOST_STATUS, 0));
            }
        }
    }

    /// True if memory of the host was lost, so that its commands fail until the next reset.
    #[inline]
    pub(crate) fn has_lost_memory(&self) -> bool {
        self.faults == MEMORY_LOST
    }

    /// Posts staged completions as far as there is room. Returns true if any were posted. While the
    /// queue's memory is not mapped, completions stay staged.
    #[inline]
    pub(crate) fn post(&mut self) -> bool {
        let size = self.layout.size;
        let space = |cq: &Self| size.entries() - 1 - size.distance(cq.head.last(), cq.tail);
        // The entries of I/O completions are reserved, but an admin completion may have to wait for
        // room.
        let mut count = self.staged.len() as u32;
        if count > space(self) {
            self.poll_head();
            count = count.min(space(self));
        }
        let Some(ring) = &self.ring else { return false };
        // The phase tag is the lowest bit of the status field. It is 0 in staged completions.
        let tag = |phase: bool| u64::from(phase) << 48;
        let to_end = (size.entries() - u32::from(self.tail)).min(count);
        self.counters.completions.add(u64::from(count));
        let (now, wrapped) = self.staged[..count as usize].split_at(to_end as usize);
        ring.publish_run(u32::from(self.tail), now, tag(self.phase));
        self.tail = size.forward(self.tail, to_end);
        if self.tail == 0 && to_end != 0 {
            self.phase = !self.phase;
            ring.publish_run(0, wrapped, tag(self.phase));
            self.tail = wrapped.len() as u16;
        }
        if count as usize == self.staged.len() {
            self.staged.clear();
        } else {
            self.staged.drain(..count as usize);
        }
        self.reserved -= count;
        self.interrupt.posted(count);
        self.unlooked += count;
        if self.unlooked >= self.layout.size.entries() / 4 {
            // The head is read regularly even if no queue waits for room, because EventIdx moves
            // only then. Otherwise the host's head would pass EventIdx, and the host would write
            // the doorbell register.
            self.poll_head();
        }
        count != 0
    }

    /// Decides about the interrupt for completions that were just posted.
    #[inline]
    pub(crate) fn notify_host(&mut self, coalescing: &Coalescing) {
        if self.interrupt.is_due() {
            self.decide(coalescing);
        }
    }

    fn decide(&mut self, coalescing: &Coalescing) {
        match self.interrupt.coalesce(coalescing) {
            Some(Decision::Raise) => return self.raise(),
            Some(Decision::Hold) => {
                self.counters.interrupts_suppressed.add(1);
                return;
            }
            None => {}
        }
        if self.interrupt.is_unconsumed() {
            self.poll_head();
        }
        match self.interrupt.decide() {
            Decision::Raise => self.raise(),
            Decision::Hold => self.counters.interrupts_suppressed.add(1),
        }
    }

    /// True if an interrupt is held for any reason.
    #[inline]
    pub(crate) fn is_holding(&self) -> bool {
        self.interrupt.is_holding()
    }

    /// True if an interrupt is held by moderation, so briefly that a sleep is not worthwhile.
    pub(crate) fn is_about_to_notify(&self) -> bool {
        self.interrupt.is_moderating()
    }

    /// Raises held interrupts that are due, while the I/O thread is awake. Only called while
    /// [`is_holding`](Self::is_holding).
    pub(crate) fn raise_due(&mut self) {
        let now = Instant::now();
        if self.interrupt.is_coalescing_expired(now) {
            self.raise();
        }
        if !self.interrupt.is_suppressed_or_moderated() {
            return;
        }
        self.poll_head();
        let unread = self.unread();
        if self.interrupt.decide_held(unread, now) == Decision::Raise {
            self.raise();
        }
    }

    /// Raises held interrupts before a sleep, except coalesced ones. Returns the deadline of a
    /// coalesced interrupt.
    pub(crate) fn flush_interrupts(&mut self) -> Option<Instant> {
        if self.interrupt.is_suppressed_or_moderated() {
            self.raise();
        }
        self.interrupt.deadline()
    }

    /// Number of entries that are posted and not consumed, according to the last read of the head.
    fn unread(&self) -> u32 {
        self.layout.size.distance(self.head.last(), self.tail)
    }

    fn raise(&mut self) {
        let unread = self.unread();
        if self.interrupt.has_line() {
            self.counters.interrupts.add(1);
        }
        self.interrupt.raise(unread);
    }
}
