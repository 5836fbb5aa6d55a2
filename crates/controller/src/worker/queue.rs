//! Submission and completion queues, as the worker that owns them sees them.

use crate::interrupt::{Coalescing, IrqLine};
use crate::shared::DSTRD;
use crate::stats::{CqStats, DoorbellCounts, SqStats};
use crate::worker::ahead::Told;
use crate::worker::io::Ended;
use crate::worker::moderation::{Moderation, Patience};
use shadowbell_doorbell::{CqHead, InvalidDoorbell, RingSize, SqTail};
use shadowbell_memory::{DmaTable, Fault, Ring, SharedU32};
use shadowbell_spec::dbbuf::{cq_entry_offset, sq_entry_offset};
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use std::time::{Duration, Instant};

/// How long a suppressed interrupt may stay owed while the worker is awake, if the host shows no
/// sign of consuming what was announced before, and the worker does not wait for hosts longer than
/// that. (A worker that goes to sleep pays all its debts.)
const OWED_AT_MOST: Duration = Duration::from_micros(100);

/// Completions in a cache line.
const PER_LINE: u32 = 4;

/// Where the entries of a queue are, and how many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) qid: u16,
    pub(crate) iova: u64,
    pub(crate) size: RingSize,
}

/// The cells of one doorbell's shadow entry.
#[derive(Clone, Debug)]
pub(crate) struct ShadowCells {
    pub(crate) value: SharedU32,
    pub(crate) event_idx: SharedU32,
}

impl ShadowCells {
    /// The entry at `offset` of the two pages, if both are mapped and writable.
    pub(crate) fn resolve(
        table: &DmaTable,
        (shadow, event_idx): (u64, u64),
        offset: u64,
    ) -> Option<Self> {
        let cell = |page: u64| table.bytes(page.checked_add(offset)?, 4)?.cell(0);
        Some(Self { value: cell(shadow)?, event_idx: cell(event_idx)? })
    }
}

/// A submission queue.
#[derive(Debug)]
pub(crate) struct Sq {
    pub(crate) place: Placement,
    /// `None` while its memory is not mapped: it then stands still.
    pub(crate) ring: Option<Ring<{ Sqe::SIZE }>>,
    pub(crate) tail: SqTail<SharedU32>,
    pub(crate) head: u16,
    /// Index of its completion queue in the tenant's list.
    pub(crate) cq: usize,
    /// Fetched and not completed.
    pub(crate) in_flight: u32,
    /// Fetching stopped for want of completion queue space.
    pub(crate) blocked: bool,
    /// Being deleted: nothing more is fetched.
    pub(crate) stopped: bool,
    /// What the disk has been told of the entries that wait.
    pub(crate) told: Told,
    pub(crate) stats: SqStats,
}

impl Sq {
    pub(crate) fn new(place: Placement, register: SharedU32, cq: usize) -> Self {
        Self {
            place,
            ring: None,
            tail: SqTail::new(place.size, register),
            head: 0,
            cq,
            in_flight: 0,
            blocked: false,
            stopped: false,
            told: Told::default(),
            stats: SqStats { qid: place.qid, ..SqStats::default() },
        }
    }

    /// A command that a disk had pending has ended: its completion.
    #[inline]
    pub(crate) fn end(&mut self, ended: &Ended) -> Cqe {
        let status = match ended.status.code() {
            // Nobody asked for that: the deletion of the queue ends it.
            Status::ABORT_REQUESTED if self.stopped => Status::ABORTED_SQ_DELETION,
            _ => ended.status,
        };
        self.in_flight = self.in_flight.saturating_sub(1);
        Cqe::new(ended.cid, self.place.qid, self.head, status, ended.dw0)
    }

    /// Finds the queue's memory in `table`.
    pub(crate) fn resolve(&mut self, table: &DmaTable) -> Result<(), Fault> {
        self.ring = None;
        let entries = self.place.size.entries();
        self.ring = Some(Ring::resolve(table, self.place.iova, entries, false)?);
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
        let Some(pages) = pages else { return };
        self.tail.disable();
        let offset = sq_entry_offset(self.place.qid, DSTRD);
        match ShadowCells::resolve(table, pages, offset) {
            Some(cells) => self.tail.reattach(cells.value, cells.event_idx),
            None => self.ring = None,
        }
    }

    /// The next entry. The caller knows that there is one (`head` is not the tail).
    pub(crate) fn fetch(&mut self) -> Option<Sqe> {
        let sqe = self.ring.as_ref()?.read(u32::from(self.head));
        self.head = self.place.size.forward(self.head, 1);
        self.stats.commands += 1;
        Some(sqe)
    }

    pub(crate) fn snapshot(&self, mmio_writes: u64) -> SqStats {
        let mut stats = self.stats.clone();
        stats.doorbell = DoorbellCounts::default();
        stats.doorbell.add(mmio_writes, self.tail.stats());
        stats
    }
}

/// A completion queue with its interrupt.
#[derive(Debug)]
pub(crate) struct Cq {
    pub(crate) place: Placement,
    /// `None` while its memory is not mapped: completions wait in `staged`.
    pub(crate) ring: Option<Ring<{ Cqe::SIZE }>>,
    pub(crate) head: CqHead<SharedU32>,
    pub(crate) tail: u16,
    /// The phase tag of the entries being posted now.
    pub(crate) phase: bool,
    /// Entries promised to commands that were fetched and are not posted yet.
    pub(crate) reserved: u32,
    /// Completions of the batch under way: written together, so that the host, which polls the
    /// same cache line, is not in between.
    staged: Vec<[u64; 2]>,
    /// Posted since the head was last looked at.
    unlooked: u32,
    irq: Option<IrqLine>,
    /// Posted since the last interrupt.
    unannounced: u32,
    /// Entries that the host has yet to consume to reach what the last interrupt announced.
    awaited: u32,
    /// Since when an interrupt has been suppressed that is still owed.
    owed: Option<Instant>,
    /// When coalescing has to end.
    coalesced: Option<Instant>,
    moderation: Moderation,
    pub(crate) stats: CqStats,
}

impl Cq {
    pub(crate) fn new(
        place: Placement,
        register: SharedU32,
        irq: Option<IrqLine>,
        patience: Patience,
    ) -> Self {
        Self {
            place,
            ring: None,
            moderation: Moderation::new(patience),
            head: CqHead::new(place.size, register),
            tail: 0,
            phase: true,
            reserved: 0,
            staged: Vec::with_capacity(64),
            unlooked: 0,
            irq,
            unannounced: 0,
            awaited: 0,
            owed: None,
            coalesced: None,
            stats: CqStats { qid: place.qid, ..CqStats::default() },
        }
    }

    pub(crate) fn resolve(&mut self, table: &DmaTable) -> Result<(), Fault> {
        self.ring = None;
        let entries = self.place.size.entries();
        self.ring = Some(Ring::resolve(table, self.place.iova, entries, true)?);
        Ok(())
    }

    pub(crate) fn shadow(&mut self, cells: Option<ShadowCells>) {
        match cells {
            Some(cells) => self.head.enable(cells.value, cells.event_idx),
            None => self.head.disable(),
        }
    }

    /// Entries that can still be promised, by the head as last seen.
    #[inline]
    pub(crate) fn free(&self) -> u32 {
        let size = self.place.size;
        (size.entries() - 1)
            .saturating_sub(size.distance(self.head.last(), self.tail))
            .saturating_sub(self.reserved)
    }

    /// Looks at the host's head.
    #[inline]
    pub(crate) fn look(&mut self) -> Result<(), InvalidDoorbell> {
        let before = self.head.last();
        self.unlooked = 0;
        let outcome = self.head.look(self.tail).map(|_| ());
        self.moved_from(before);
        outcome
    }

    /// Notes that the head was `before` and may have moved (also after a recheck).
    #[inline]
    pub(crate) fn moved_from(&mut self, before: u16) {
        let moved = self.place.size.distance(before, self.head.last());
        self.awaited = self.awaited.saturating_sub(moved);
    }

    /// As [`Sq::remap`].
    pub(crate) fn remap(&mut self, table: &DmaTable, pages: Option<(u64, u64)>) {
        let _ = self.resolve(table);
        let Some(pages) = pages else { return };
        self.head.disable();
        let offset = cq_entry_offset(self.place.qid, DSTRD);
        match ShadowCells::resolve(table, pages, offset) {
            Some(cells) => self.head.reattach(cells.value, cells.event_idx),
            None => self.ring = None,
        }
    }

    /// Brings the places of the next `count` completions near, as far as they are worth it.
    #[inline]
    pub(crate) fn prefetch(&self, count: u32) {
        let Some(ring) = &self.ring else { return };
        let tail = u32::from(self.tail);
        ring.prefetch_for_write(tail);
        if count > PER_LINE {
            ring.prefetch_for_write(tail + PER_LINE);
        }
    }

    /// Stages the completion of a command for which an entry was reserved. The phase tag is set
    /// when it is posted.
    #[inline]
    pub(crate) fn complete(&mut self, cqe: Cqe) {
        self.staged.push(zerocopy::transmute!(cqe));
    }

    /// Notes that the host has submitted commands that complete here.
    #[inline]
    pub(crate) fn feed(&mut self) {
        self.moderation.feed();
    }

    /// How many completions wait to be posted.
    pub(crate) fn staged(&self) -> u32 {
        self.staged.len() as u32
    }

    /// Whether completions wait to be posted.
    #[inline]
    pub(crate) fn has_staged(&self) -> bool {
        !self.staged.is_empty()
    }

    /// Posts what was staged, as far as there is room. Waits (staged) while the queue's memory is
    /// not mapped.
    #[inline]
    pub(crate) fn post(&mut self) -> bool {
        let size = self.place.size;
        let space = |cq: &Self| size.entries() - 1 - size.distance(cq.head.last(), cq.tail);
        // An I/O completion has its entry reserved; an admin one may have to wait.
        let mut count = self.staged.len() as u32;
        if count > space(self) {
            let _ = self.look();
            count = count.min(space(self));
        }
        let Some(ring) = &self.ring else { return false };
        // The phase tag is the lowest bit of the status field, and what was staged has none.
        let tag = |phase: bool| u64::from(phase) << 48;
        let to_end = (size.entries() - u32::from(self.tail)).min(count);
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
        self.reserved = self.reserved.saturating_sub(count);
        self.unannounced += count;
        self.stats.completions += u64::from(count);
        self.unlooked += count;
        if self.unlooked >= self.place.size.entries() / 4 {
            // Often enough that EventIdx stays out of the way of a head that nobody waits for.
            let _ = self.look();
        }
        count != 0
    }

    /// Decides on the interrupt for what was just posted.
    #[inline]
    pub(crate) fn announce(&mut self, coalescing: &Coalescing) {
        if self.irq.is_some() && self.unannounced != 0 {
            self.consider(coalescing);
        }
    }

    fn consider(&mut self, coalescing: &Coalescing) {
        let Some(irq) = &self.irq else { return };
        if let Some(aggregation) = coalescing.of(irq.vector())
            && self.unannounced < aggregation.threshold
        {
            let until = *self.coalesced.get_or_insert_with(|| Instant::now() + aggregation.time);
            if Instant::now() < until {
                self.stats.interrupts_suppressed += 1;
                return;
            }
        }
        // An invalid head is reported where commands are fetched; here it only means "no news".
        if self.awaited != 0 {
            let _ = self.look();
        }
        if self.awaited != 0 {
            self.stats.interrupts_suppressed += 1;
            self.owed.get_or_insert_with(Instant::now);
        } else if self.moderation.add(self.unannounced, Instant::now()) {
            self.raise();
        } else {
            self.stats.interrupts_suppressed += 1;
        }
    }

    /// Whether an interrupt is held back, for whatever reason.
    #[inline]
    pub(crate) fn is_holding(&self) -> bool {
        self.owed.is_some() || self.coalesced.is_some() || self.moderation.is_holding()
    }

    /// Whether an interrupt is held back for a moment, for which it is not worth to go to sleep.
    pub(crate) fn is_about_to_announce(&self) -> bool {
        self.moderation.is_holding()
    }

    /// Looks after interrupts that are held back, while the worker is awake. Only to be called
    /// while [`is_holding`](Self::is_holding).
    pub(crate) fn tend(&mut self) {
        let now = Instant::now();
        if self.coalesced.is_some_and(|until| now >= until) {
            self.raise();
        }
        if !(self.owed.is_some() || self.moderation.is_holding()) {
            return;
        }
        let _ = self.look();
        // What the host has consumed by itself needs no announcement.
        let unseen = self.place.size.distance(self.head.last(), self.tail);
        self.unannounced = self.unannounced.min(unseen);
        if self.unannounced == 0 {
            self.owed = None;
            self.moderation.let_go();
            return;
        }
        let due = match self.owed {
            Some(_) if self.awaited == 0 => {
                self.owed = None;
                self.moderation.add(self.unannounced, now)
            }
            Some(since) => {
                now.duration_since(since) >= self.moderation.patience().most.max(OWED_AT_MOST)
            }
            None => self.moderation.is_due(now),
        };
        if due {
            self.raise();
        }
    }

    /// Pays what is owed before a sleep. Coalesced interrupts may wait until they are due, which
    /// is then the sleep's deadline.
    pub(crate) fn settle(&mut self) -> Option<Instant> {
        if self.owed.is_some() || self.moderation.is_holding() {
            self.raise();
        }
        self.coalesced
    }

    fn raise(&mut self) {
        self.owed = None;
        self.coalesced = None;
        self.moderation.let_go();
        self.unannounced = 0;
        self.awaited = self.place.size.distance(self.head.last(), self.tail);
        if let Some(irq) = &mut self.irq {
            irq.raise();
            self.stats.interrupts += 1;
        }
    }

    pub(crate) fn snapshot(&self, mmio_writes: u64) -> CqStats {
        let mut stats = self.stats.clone();
        stats.doorbell = DoorbellCounts::default();
        stats.doorbell.add(mmio_writes, self.head.stats());
        stats
    }
}
