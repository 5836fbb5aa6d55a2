//! One controller, as far as one worker serves it.

use crate::interrupt::IrqLine;
use crate::latch::Latch;
use crate::shared::{DSTRD, Report, Shared};
use crate::trace::{COMPLETION_QUEUE, Kind, TraceRing};
use crate::worker::ahead::{self, Ahead};
use crate::worker::io::{Ended, Engine, Space};
use crate::worker::mailbox::Mailbox;
use crate::worker::message::{Reply, Seed, WorkerStats};
use crate::worker::moderation::Patience;
use crate::worker::notes::{note, note_look, report_error};
use crate::worker::queue::{Cq, Placement, ShadowCells, Sq};
use shadowbell_doorbell::InvalidDoorbell;
use shadowbell_memory::{DmaTable, EventFd, View, ViewWatch};
use shadowbell_spec::dbbuf::{cq_entry_offset, sq_entry_offset};
use shadowbell_spec::regs::DoorbellKind;
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

#[cfg(feature = "faults")]
#[path = "../faults/tenant.rs"]
mod faulty;
mod rest;

/// Commands fetched from one queue before the others get their turn: round robin with a burst
/// (Base 2.1, "Round Robin Arbitration").
const BURST: u32 = 64;

/// How far ahead of the command that is executed entries are brought near: far enough that they
/// are there in time, near enough that few are fetched in vain from a queue that is short.
const AHEAD: u32 = 4;

/// Completions that are posted together while more commands wait to be executed: four cache lines of
/// them, which the host works on meanwhile.
const POST_AFTER: u32 = 16;

/// The state cell of a worker's sleeper.
pub(crate) type SleepCell = Arc<AtomicU32>;

/// One controller's queues on one worker.
pub(crate) struct Tenant {
    shared: Arc<Shared>,
    engine: Engine,
    sqs: Vec<Option<Sq>>,
    cqs: Vec<Option<Cq>>,
    shadow: Option<(u64, u64)>,
    /// Descriptors that have the worker look at this tenant's doorbells.
    kicks: Vec<EventFd>,
    /// Old DMA maps that commands in flight may still use, with who waits for their end: and for that of
    /// all before, because what is in one map may have been in those, too.
    draining: VecDeque<(ViewWatch, Vec<Latch>)>,
    /// Submission queues that are to be forgotten once they are empty.
    deleting: Vec<(usize, Latch)>,
    detaching: Option<Latch>,
    /// `shadowbell_memory::sigbus::losses` when it was last looked at: what was lost before this tenant came is
    /// still in its map.
    losses: u64,
    /// The loss of something in the present map has been reported.
    lost: bool,
    #[cfg(feature = "faults")]
    parked: faulty::Parked,
}

impl Tenant {
    /// Opens the namespaces for this thread.
    pub(crate) fn new(seed: &Seed) -> Result<Self, std::io::Error> {
        let spaces = seed.namespaces.iter().map(Space::open).collect::<Result<_, _>>()?;
        let view = View::new(Arc::clone(&seed.table));
        Ok(Self {
            shared: Arc::clone(&seed.shared),
            engine: Engine::new(view, seed.page_size, seed.max_transfer, spaces),
            sqs: Vec::new(),
            cqs: Vec::new(),
            shadow: seed.shadow,
            kicks: Vec::new(),
            draining: VecDeque::new(),
            deleting: Vec::new(),
            detaching: None,
            losses: 0,
            lost: false,
            #[cfg(feature = "faults")]
            parked: faulty::Parked::default(),
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.shared.id
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn spaces(&self) -> &[Space] {
        self.engine.spaces()
    }

    /// Holds on to a descriptor that the worker waits for, until the tenant goes.
    pub(crate) fn keep_kick(&mut self, event: EventFd) {
        self.kicks.push(event);
    }

    /// How often the host has signalled one of them: the descriptors count that by themselves. They
    /// are not read, because the host shares them and could have a read block.
    fn count_kicks(&self) -> u64 {
        self.kicks.iter().map(EventFd::count).fold(0, u64::saturating_add)
    }

    pub(crate) fn kicks(&self) -> &[EventFd] {
        &self.kicks
    }

    fn table(&self) -> Arc<DmaTable> {
        Arc::clone(self.engine.view().table())
    }

    fn sq_cells(&self, qid: u16) -> Option<ShadowCells> {
        ShadowCells::resolve(&self.table(), self.shadow?, sq_entry_offset(qid, DSTRD))
    }

    fn cq_cells(&self, qid: u16) -> Option<ShadowCells> {
        ShadowCells::resolve(&self.table(), self.shadow?, cq_entry_offset(qid, DSTRD))
    }

    pub(crate) fn create_cq(
        &mut self,
        place: Placement,
        vector: Option<u16>,
        patience: Patience,
        reply: Reply,
    ) {
        let register = self.shared.register(place.qid, DoorbellKind::Cq);
        let irq = vector.map(|v| IrqLine::new(Arc::clone(&self.shared.irqs), v));
        let mut cq = Cq::new(place, register, irq, patience);
        // Unmapped memory was refused by the control plane; if it went since, the queue waits.
        let _ = cq.resolve(&self.table());
        cq.shadow(self.cq_cells(place.qid));
        insert(&mut self.cqs, cq);
        reply(Ok(()));
    }

    pub(crate) fn create_sq(&mut self, place: Placement, cqid: u16, reply: Reply) {
        let cq = self.cqs.iter().position(|c| c.as_ref().is_some_and(|c| c.place.qid == cqid));
        let Some(cq) = cq else { return reply(Err(Status::CQ_INVALID.with_dnr())) };
        let register = self.shared.register(place.qid, DoorbellKind::Sq);
        let mut sq = Sq::new(place, register, cq);
        let _ = sq.resolve(&self.table());
        sq.shadow(self.sq_cells(place.qid));
        insert(&mut self.sqs, sq);
        reply(Ok(()));
    }

    fn find_sq(&self, qid: u16) -> Option<usize> {
        self.sqs.iter().position(|q| q.as_ref().is_some_and(|q| q.place.qid == qid))
    }

    pub(crate) fn delete_sq(&mut self, qid: u16, latch: Latch) {
        let Some(index) = self.find_sq(qid) else { return };
        if let Some(sq) = &mut self.sqs[index] {
            sq.stopped = true;
        }
        self.engine.cancel_all(Some(index));
        #[cfg(feature = "faults")]
        self.forget_hung(index);
        self.deleting.push((index, latch));
    }

    pub(crate) fn delete_cq(&mut self, qid: u16) {
        let index = self.cqs.iter().position(|c| c.as_ref().is_some_and(|c| c.place.qid == qid));
        if let Some(cq) = index.and_then(|i| self.cqs[i].take()) {
            self.retire_cq(&cq);
        }
    }

    /// Doorbell Buffer Config: every queue gets its entry, with commands in flight or not.
    pub(crate) fn enable_shadow(&mut self, pages: (u64, u64)) {
        self.shadow = Some(pages);
        let table = self.table();
        for sq in self.sqs.iter_mut().flatten() {
            sq.shadow(ShadowCells::resolve(&table, pages, sq_entry_offset(sq.place.qid, DSTRD)));
        }
        for cq in self.cqs.iter_mut().flatten() {
            cq.shadow(ShadowCells::resolve(&table, pages, cq_entry_offset(cq.place.qid, DSTRD)));
        }
    }

    /// Takes over another DMA map. Queues are found again in it, or stand still until a map that
    /// has them; a shadow entry is kept as it is (its state survives the remapping).
    pub(crate) fn change_table(&mut self, table: Arc<DmaTable>, latches: Vec<Latch>) {
        let old = self.engine.change_view(View::new(Arc::clone(&table)));
        self.lost = false;
        self.draining.push_back((old.watch(), latches));
        drop(old);
        let pages = self.shadow;
        self.sqs.iter_mut().flatten().for_each(|sq| sq.remap(&table, pages));
        self.cqs.iter_mut().flatten().for_each(|cq| cq.remap(&table, pages));
    }

    pub(crate) fn flush(&mut self, latch: Latch) {
        self.engine.flush_all(latch);
    }

    pub(crate) fn abort(&mut self, sqid: u16, cid: u16, reply: crate::worker::message::AbortReply) {
        #[cfg(feature = "faults")]
        let Some(reply) = self.abort_hung(self.find_sq(sqid).unwrap_or(usize::MAX), cid, reply)
        else {
            return;
        };
        match self.find_sq(sqid) {
            Some(index) => self.engine.abort(index, cid, reply),
            None => reply.answer(false),
        }
    }

    pub(crate) fn detach(&mut self, latch: Latch) {
        // First of all the shadow pages: after a reset they may be anybody's memory.
        self.shadow = None;
        for sq in self.sqs.iter_mut().flatten() {
            sq.tail.disable();
            sq.stopped = true;
        }
        for cq in self.cqs.iter_mut().flatten() {
            cq.head.disable();
            cq.ring = None;
        }
        self.engine.cancel_all(None);
        #[cfg(feature = "faults")]
        self.parked.clear();
        self.detaching = Some(latch);
    }

    /// Whether an interrupt is held back for a moment.
    pub(crate) fn is_about_to_announce(&self) -> bool {
        self.cqs.iter().flatten().any(Cq::is_about_to_announce)
    }

    /// Whether its disks have something in hand.
    pub(crate) fn is_pending(&self) -> bool {
        self.engine.pending() != 0
    }

    /// How many requests have ended at its disks.
    pub(crate) fn ended(&self) -> u64 {
        self.engine.ended()
    }

    /// Whether it is being detached.
    pub(crate) fn is_leaving(&self) -> bool {
        self.detaching.is_some()
    }

    /// Whether a detach has come to its end: nothing of this controller is in flight.
    pub(crate) fn is_detached(&self) -> bool {
        self.detaching.is_some() && self.engine.pending() == 0
    }

    /// Folds the counters into the controller's before the tenant goes.
    pub(crate) fn retire(&mut self) {
        let sqs: Vec<Sq> = self.sqs.iter_mut().filter_map(Option::take).collect();
        let cqs: Vec<Cq> = self.cqs.iter_mut().filter_map(Option::take).collect();
        sqs.iter().for_each(|sq| self.retire_sq(sq));
        cqs.iter().for_each(|cq| self.retire_cq(cq));
        let io = std::mem::take(&mut self.engine.stats);
        self.shared.retire(|retired| {
            retired.io.merge(&io);
            retired.events = retired.events.saturating_add(self.count_kicks());
        });
    }

    fn retire_sq(&self, sq: &Sq) {
        let stats = sq.snapshot(self.shared.take_traps(sq.place.qid, DoorbellKind::Sq));
        self.shared.retire(|retired| retired.sq.merge(&stats));
    }

    fn retire_cq(&self, cq: &Cq) {
        let stats = cq.snapshot(self.shared.take_traps(cq.place.qid, DoorbellKind::Cq));
        self.shared.retire(|retired| retired.cq.merge(&stats));
    }

    pub(crate) fn snapshot(&self) -> WorkerStats {
        let traps = |qid, kind| self.shared.traps(qid, kind);
        WorkerStats {
            sqs: self
                .sqs
                .iter()
                .flatten()
                .map(|q| q.snapshot(traps(q.place.qid, DoorbellKind::Sq)))
                .collect(),
            cqs: self
                .cqs
                .iter()
                .flatten()
                .map(|q| q.snapshot(traps(q.place.qid, DoorbellKind::Cq)))
                .collect(),
            io: self.engine.stats,
            events: self.count_kicks(),
            sleep: crate::stats::SleepStats::default(),
        }
    }

    /// One pass: reaps the disks, fetches and starts commands, posts completions, raises
    /// interrupts. How much there was to do, in commands.
    // In the worker's loop, where nearly all passes are made, without a call.
    #[inline(always)]
    pub(crate) fn pass(&mut self, mailbox: &Mailbox, trace: &mut Option<TraceRing>) -> u32 {
        let mut work = 0;
        if self.engine.pending() != 0 {
            work += u32::from(self.reap());
        }
        #[cfg(feature = "faults")]
        if self.parked.is_waiting() {
            self.release_delayed();
        }
        for index in 0..self.sqs.len() {
            work += self.serve(index, mailbox, trace);
        }
        self.engine.commit();
        for cq in self.cqs.iter_mut().flatten() {
            if cq.has_staged() && cq.post() {
                cq.announce(&self.shared.coalescing);
            } else if cq.is_holding() {
                cq.tend();
            }
        }
        if !(self.draining.is_empty() && self.deleting.is_empty()) {
            self.finish();
        }
        work
    }

    #[inline]
    fn serve(&mut self, index: usize, mailbox: &Mailbox, trace: &mut Option<TraceRing>) -> u32 {
        let Some(sq) = &mut self.sqs[index] else { return 0 };
        if sq.stopped || sq.ring.is_none() {
            return 0;
        }
        let before = trace.is_some().then(|| (sq.tail.last(), sq.tail.stats()));
        let tail = match sq.tail.look() {
            Ok(tail) => {
                if let Some(before) = before {
                    note_look(trace, &self.shared, sq, before);
                }
                tail
            }
            Err(error) => {
                let (qid, tail) = (sq.place.qid, sq.tail.last());
                self.invalid(qid, error, trace);
                tail
            }
        };
        if self.sqs[index].as_ref().is_none_or(|sq| sq.head == tail) {
            return 0;
        }
        // What the host did before it submitted comes first: memory that it has just mapped for
        // these commands may still be in a message. The tail was loaded with acquire ordering, so a
        // message that was sent before the host moved it is seen here.
        if mailbox.has_news() {
            return 1;
        }
        if self.engine.wants_prefetch_hints() {
            self.fetch::<true>(index, tail, trace)
        } else {
            self.fetch::<false>(index, tail, trace)
        }
    }

    // Not inlined: with the rest of a turn around it, the loop would have no registers left.
    #[inline(never)]
    fn fetch<const TELL: bool>(
        &mut self,
        index: usize,
        tail: u16,
        trace: &mut Option<TraceRing>,
    ) -> u32 {
        #[cfg(feature = "faults")]
        if let Some(injector) = self.shared.faults.armed() {
            return self.fetch_faulty(index, tail, trace, &injector);
        }
        let Some(sq) = &mut self.sqs[index] else { return 0 };
        let Some(cq) = self.cqs.get_mut(sq.cq).and_then(Option::as_mut) else { return 0 };
        if cq.ring.is_none() {
            return 0;
        }
        let mut room = cq.free().min(BURST);
        if room == 0 || room < BURST && room < sq.place.size.distance(sq.head, tail) {
            if let Err(error) = cq.look() {
                let qid = cq.place.qid | COMPLETION_QUEUE;
                self.invalid(qid, error, trace);
                return 0;
            }
            room = cq.free().min(BURST);
        }
        if room == 0 {
            if !std::mem::replace(&mut sq.blocked, true) {
                sq.stats.blocked += 1;
                note(trace, Kind::CqFull, &self.shared, cq.place.qid, u32::from(cq.tail), 0);
            }
            return 0;
        }
        sq.blocked = false;
        self.engine.set_write_through(self.shared.is_write_through());
        let Some(ring) = &sq.ring else { return 0 };
        let (mut head, mut pending, mut posted) = (sq.head, 0, false);
        let fetched = room.min(sq.place.size.distance(head, tail));
        // Not further than the host has written: it would have to take the line back.
        (0..fetched.min(AHEAD)).for_each(|ahead| ring.prefetch(u32::from(head) + ahead));
        cq.prefetch(fetched);
        cq.feed();
        cq.reserved += fetched;
        let mut ahead = Ahead::of(fetched, sq.told);
        let mut done = 0;
        while done < fetched {
            let stop = fetched.min(done + if TELL { ahead::POST_AFTER } else { POST_AFTER });
            while done < stop {
                if done + AHEAD < fetched {
                    ring.prefetch(u32::from(head) + AHEAD);
                }
                if TELL {
                    let waiting = || sq.place.size.distance(head, sq.tail.peek());
                    ahead.prefetch_hint(&self.engine, ring, head, done, waiting);
                }
                done += 1;
                let sqe: Sqe = ring.read(u32::from(head));
                head = sq.place.size.forward(head, 1);
                let status = match self.engine.start(&sqe, index) {
                    Ok(true) => Status::SUCCESS,
                    Ok(false) => {
                        pending += 1;
                        continue;
                    }
                    Err(status) => {
                        self.engine.count_error(status);
                        let (cid, nsid, lba) = (sqe.cid, sqe.nsid, sqe.cdw10_11());
                        let ended = Ended { sq: index, cid, status, nsid, lba, dw0: 0 };
                        report_error(&self.shared, sq.place.qid, &ended);
                        status
                    }
                };
                cq.complete(Cqe::new(sqe.cid, sq.place.qid, head, status, 0));
            }
            posted |= cq.has_staged() && cq.post();
        }
        sq.head = head;
        if TELL {
            sq.told = ahead.end(fetched);
        }
        sq.in_flight += pending;
        sq.stats.commands += u64::from(fetched);
        sq.stats.batches += 1;
        sq.stats.largest_batch = sq.stats.largest_batch.max(u64::from(fetched));
        if trace.is_some() {
            note(trace, Kind::Batch, &self.shared, sq.place.qid, u32::from(tail), fetched);
        }
        if posted {
            let before = (cq.stats.interrupts, cq.stats.interrupts_suppressed);
            cq.announce(&self.shared.coalescing);
            if trace.is_some() {
                let (qid, at) = (cq.place.qid, u32::from(cq.tail));
                if cq.stats.interrupts != before.0 {
                    note(trace, Kind::InterruptRaised, &self.shared, qid, at, 0);
                } else if cq.stats.interrupts_suppressed != before.1 {
                    note(trace, Kind::InterruptSuppressed, &self.shared, qid, at, 0);
                }
            }
        }
        fetched
    }

    fn reap(&mut self) -> bool {
        #[cfg(feature = "faults")]
        if let Some(injector) = self.shared.faults.armed() {
            return self.reap_faulty(&injector);
        }
        let mut busy = false;
        let Self { engine, sqs, cqs, shared, .. } = self;
        let more = engine.reap(|ended| {
            busy = true;
            let Some(sq) = sqs.get_mut(ended.sq).and_then(Option::as_mut) else { return };
            let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) else { return };
            let cqe = sq.end(&ended);
            cq.complete(cqe);
            if !cqe.status().is_success() {
                report_error(shared, sq.place.qid, &ended);
            }
        });
        busy | more
    }

    /// `qid` says with [`COMPLETION_QUEUE`] which of the two doorbells it was.
    #[cold]
    fn invalid(&self, qid: u16, error: InvalidDoorbell, trace: &mut Option<TraceRing>) {
        note(trace, Kind::Invalid, &self.shared, qid, error.value, 0);
        self.shared.report(Report::InvalidDoorbell { qid: qid & !COMPLETION_QUEUE });
    }

    /// Somebody's memory was lost: whether it is this one's. A host that loses a piece in each of its
    /// tens of thousands of maps is looked through once for each map that it has, not for each piece.
    #[cold]
    pub(crate) fn check_memory(&mut self) {
        let losses = shadowbell_memory::sigbus::losses(self.shared.id);
        if std::mem::replace(&mut self.losses, losses) == losses || self.lost {
            return;
        }
        if self.engine.view().table().is_poisoned() {
            self.lost = true;
            self.shared.report(Report::MemoryLost);
        }
    }

    /// Lets those go who wait for something that has come to its end.
    fn finish(&mut self) {
        while self.draining.front().is_some_and(|(watch, _)| watch.is_idle()) {
            self.draining.pop_front();
        }
        let mut index = 0;
        while index < self.deleting.len() {
            let sq = self.deleting[index].0;
            if self.sqs[sq].as_ref().is_none_or(|q| q.in_flight == 0) {
                if let Some(sq) = self.sqs[sq].take() {
                    self.retire_sq(&sq);
                }
                self.deleting.swap_remove(index);
            } else {
                index += 1;
            }
        }
    }
}

/// Puts a queue in the first hole, so that indices stay what they are.
fn insert<T>(list: &mut Vec<Option<T>>, item: T) {
    match list.iter_mut().find(|slot| slot.is_none()) {
        Some(slot) => *slot = Some(item),
        None => list.push(Some(item)),
    }
}
