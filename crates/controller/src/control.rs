//! The control plane of a controller: its registers and what follows from them.
//!
//! Everything here runs under one lock, which no worker takes to serve a command and under which
//! nobody ever waits: what takes time is sent to the workers as a message, and goes on when the
//! last of them drops its latch.

use crate::admin::events::AsyncEvents;
use crate::admin::features::Features;
use crate::admin::identify::Identity;
use crate::admin::logs::{ChangedList, ErrorLog};
use crate::admin::queue::AdminQueue;
use crate::config::Config;
use crate::controller::{Event, Inner};
use crate::latch::Latch;
use crate::shared::{Report, Shared};
use crate::stats::Stats;
use crate::worker::message::Message;
use crate::worker::queue::Placement;
use shadowbell_memory::{DmaError, DmaSpace, EventFd, SharedBytes};
use shadowbell_spec::regs::{self, Aqa, Cap, Cc, Crto, Csts, Vs};
use shadowbell_spec::status::Status;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// CAP.TO and CRTO: how long a host may have to wait for CSTS.RDY, in units of 500 ms. Commands in
/// flight on a slow disk have to end before a reset is complete.
const READY_TIMEOUT: u8 = 60;
/// CAP.MPSMAX: 2^(12 + 4), 64 KiB.
const MPS_MAX: u8 = 4;

/// What has to be done after the lock was let go.
#[derive(Debug, Default)]
#[must_use = "pass it to Inner::run"]
pub(crate) struct Deferred {
    pub(crate) events: Vec<Event>,
    pub(crate) latches: Vec<Latch>,
    /// The admin queue has more to do than one turn.
    pub(crate) again: bool,
}

impl Deferred {
    pub(crate) fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// CSTS.RDY is 0.
    Disabled,
    /// CSTS.RDY is 1.
    Ready,
    /// CC.EN was cleared and commands in flight are coming to their end.
    Resetting,
}

/// A submission queue that exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SqRecord {
    pub(crate) place: Placement,
    pub(crate) cqid: u16,
    pub(crate) worker: usize,
    pub(crate) state: QueueState,
}

/// A completion queue that exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CqRecord {
    pub(crate) place: Placement,
    pub(crate) vector: Option<u16>,
    pub(crate) worker: usize,
    pub(crate) state: QueueState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QueueState {
    Creating,
    Live,
    Deleting,
}

#[derive(Debug, Default)]
pub(crate) struct Registers {
    pub(crate) cc: Cc,
    pub(crate) csts: Csts,
    aqa: Aqa,
    asq: u64,
    acq: u64,
    intms: u32,
}

/// The control plane. What has to outlive a process is in here; the rest is rebuilt from it.
pub(crate) struct Control {
    pub(crate) cap: Cap,
    pub(crate) regs: Registers,
    phase: Phase,
    /// Counts resets: an answer from before one belongs to nobody.
    pub(crate) generation: u64,
    pub(crate) space: DmaSpace,
    pub(crate) admin: Option<AdminQueue>,
    pub(crate) sqs: BTreeMap<u16, SqRecord>,
    pub(crate) cqs: BTreeMap<u16, CqRecord>,
    /// Workers that have heard of this controller since the last reset.
    pub(crate) tenancies: BTreeSet<usize>,
    /// Latches to be let go after the lock, from where no [`Deferred`] is at hand.
    pub(crate) parting: Vec<Latch>,
    /// The buffers of Doorbell Buffer Config: Shadow Doorbell and EventIdx.
    pub(crate) shadow: Option<(u64, u64)>,
    /// By worker, the descriptor that has it look at the doorbells.
    pub(crate) kicks: BTreeMap<usize, EventFd>,
    /// Who waits for the reset under way.
    waiting: Vec<Latch>,
    /// Registers have to go to their power-on values when the reset under way is over.
    full_reset: bool,
    pub(crate) identity: Identity,
    pub(crate) features: Features,
    /// I/O submission and completion queues that the host may create (feature 07h).
    pub(crate) granted: (u16, u16),
    pub(crate) errors: ErrorLog,
    pub(crate) events: AsyncEvents,
    /// Changed Attached Namespace List (log page 04h).
    pub(crate) changed: ChangedList,
    /// Whom of full storage was told.
    pub(crate) full_told: crate::admin::full::Told,
    /// And of losses.
    pub(crate) loss_told: crate::admin::full::Told,
    pub(crate) aborts: u32,
    pub(crate) power_cycles: u64,
    pub(crate) unsafe_shutdowns: u64,
    pub(crate) since: std::time::Instant,
    #[cfg(feature = "faults")]
    pub(crate) overlay: crate::faults::Overlay,
}

impl Control {
    pub(crate) fn new(config: &Config, id: u32) -> Self {
        let cap = Cap::new()
            .with_mqes((config.max_queue_entries - 1) as u16)
            .with_cqr(true)
            .with_to(READY_TIMEOUT)
            .with_css(regs::CAP_CSS_NVM | regs::CAP_CSS_IO_COMMAND_SETS)
            .with_mpsmax(MPS_MAX)
            .with_crwms(true);
        Self {
            cap,
            regs: Registers::default(),
            phase: Phase::Disabled,
            generation: 0,
            space: DmaSpace::of_peer(id),
            admin: None,
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            tenancies: BTreeSet::new(),
            parting: Vec::new(),
            shadow: None,
            kicks: BTreeMap::new(),
            waiting: Vec::new(),
            full_reset: false,
            identity: Identity::new(config),
            features: Features::new(),
            granted: (config.io_queues, config.io_queues),
            errors: ErrorLog::default(),
            events: AsyncEvents::default(),
            changed: ChangedList::default(),
            full_told: crate::admin::full::Told::default(),
            loss_told: crate::admin::full::Told::default(),
            aborts: 0,
            power_cycles: 1,
            unsafe_shutdowns: 0,
            since: std::time::Instant::now(),
            #[cfg(feature = "faults")]
            overlay: crate::faults::Overlay::default(),
        }
    }

    /// Reads registers below the doorbells into `data`, which is all zeroes.
    pub(crate) fn read(&self, _inner: &Inner, offset: u64, data: &mut [u8]) {
        let mut image = [0u8; 0x70];
        let mut put = |at: u64, bytes: &[u8]| {
            image[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        };
        put(regs::CAP, &self.cap.into_bits().to_le_bytes());
        put(regs::VS, &Vs::V2_0.into_bits().to_le_bytes());
        put(regs::INTMS, &self.regs.intms.to_le_bytes());
        put(regs::INTMC, &self.regs.intms.to_le_bytes());
        put(regs::CC, &self.regs.cc.into_bits().to_le_bytes());
        put(regs::CSTS, &self.regs.csts.into_bits().to_le_bytes());
        put(regs::AQA, &self.regs.aqa.into_bits().to_le_bytes());
        put(regs::ASQ, &self.regs.asq.to_le_bytes());
        put(regs::ACQ, &self.regs.acq.to_le_bytes());
        let crto = Crto::new().with_crwmt(READY_TIMEOUT.into());
        put(regs::CRTO, &crto.into_bits().to_le_bytes());
        #[cfg(feature = "faults")]
        self.overlay.apply(&mut image);
        if let Some(from) = usize::try_from(offset).ok().and_then(|o| image.get(o..)) {
            let n = from.len().min(data.len());
            data[..n].copy_from_slice(&from[..n]);
        }
    }

    /// Writes a register below the doorbells.
    pub(crate) fn write(&mut self, inner: &Inner, offset: u64, data: &[u8]) -> Deferred {
        let mut deferred = Deferred::default();
        match *data {
            [a, b, c, d] => {
                self.write32(inner, offset, u32::from_le_bytes([a, b, c, d]), &mut deferred);
            }
            [a, b, c, d, e, f, g, h] if offset.is_multiple_of(8) => {
                self.write32(inner, offset, u32::from_le_bytes([a, b, c, d]), &mut deferred);
                self.write32(inner, offset + 4, u32::from_le_bytes([e, f, g, h]), &mut deferred);
            }
            _ => tracing::debug!(offset, len = data.len(), "ignored a register write"),
        }
        deferred
    }

    fn write32(&mut self, inner: &Inner, offset: u64, value: u32, deferred: &mut Deferred) {
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        #[cfg(feature = "faults")]
        match offset {
            _ if self.overlay.is_removed() => return,
            regs::CSTS => self.overlay.write_csts(value),
            regs::CC => self.overlay.write_cc(inner, self.regs.cc, Cc::from_bits(value)),
            _ => {}
        }
        match offset {
            regs::INTMS => self.regs.intms |= value,
            regs::INTMC => self.regs.intms &= !value,
            regs::CC => self.write_cc(inner, Cc::from_bits(value), deferred),
            regs::ACQ | 0x34 if self.regs.cc.en() => {
                let acq = if offset == regs::ACQ {
                    low(self.regs.acq) & !0xfff
                } else {
                    high(self.regs.acq)
                };
                let table = self.space.table();
                if self.admin.as_mut().is_some_and(|admin| admin.place_cq(table, acq)) {
                    self.regs.acq = acq;
                } else {
                    tracing::debug!(offset, "ignored a write while the controller is enabled");
                }
            }
            // The admin queue's place can not change under it.
            regs::AQA | regs::ASQ..=0x37 if self.regs.cc.en() => {
                tracing::debug!(offset, "ignored a write while the controller is enabled");
            }
            regs::AQA => self.regs.aqa = Aqa::from_bits(value & 0x0fff_0fff),
            regs::ASQ => self.regs.asq = low(self.regs.asq) & !0xfff,
            0x2c => self.regs.asq = high(self.regs.asq),
            regs::ACQ => self.regs.acq = low(self.regs.acq) & !0xfff,
            0x34 => self.regs.acq = high(self.regs.acq),
            _ => {}
        }
    }

    fn write_cc(&mut self, inner: &Inner, new: Cc, deferred: &mut Deferred) {
        let old = self.regs.cc;
        self.regs.cc = new;
        match (old.en(), new.en()) {
            // Early, before RDY went to 0: it counts when the reset under way is over.
            (false, true) if self.phase == Phase::Disabled => self.enable(inner, deferred),
            (true, false) => self.begin_reset(inner, false, deferred),
            _ => {}
        }
        if new.shn() != regs::SHN_NONE && old.shn() != new.shn() {
            self.shut_down(inner, deferred);
        }
    }

    /// CC.EN went from 0 to 1 (Base 2.1, "Memory-based Controller Initialization").
    fn enable(&mut self, inner: &Inner, deferred: &mut Deferred) {
        let cc = self.regs.cc;
        let page = 1u64 << (12 + u32::from(cc.mps()));
        let refusal = if cc.mps() > MPS_MAX {
            Some("CC.MPS is above CAP.MPSMAX")
        } else if !matches!(cc.css(), regs::CC_CSS_NVM | regs::CC_CSS_ALL | regs::CC_CSS_ADMIN_ONLY)
        {
            Some("CC.CSS selects a command set that is not supported")
        } else if cc.ams() != 0 {
            Some("CC.AMS selects an arbitration that is not supported")
        } else if self.regs.aqa.asqs() == 0 || self.regs.aqa.acqs() == 0 {
            Some("AQA asks for an admin queue of one entry")
        } else if !(self.regs.asq | self.regs.acq).is_multiple_of(page) {
            Some("ASQ or ACQ is not aligned to CC.MPS")
        } else {
            None
        };
        if let Some(why) = refusal {
            return self.fail(why, deferred);
        }
        let (aqa, asq, acq) = (self.regs.aqa, self.regs.asq, self.regs.acq);
        match AdminQueue::new(inner, self.space.table(), aqa, asq, acq) {
            Ok(admin) => self.admin = Some(admin),
            Err(fault) => {
                tracing::warn!(%fault, "the admin queue's memory can not be reached");
                return self
                    .fail("the admin queue is not in memory that the host shared", deferred);
            }
        }
        self.phase = Phase::Ready;
        self.regs.csts = Csts::new().with_rdy(true);
        deferred.event(Event::Enabled);
        if inner.shared.mapped {
            inner.watch();
        }
    }

    /// Nothing goes on until the next reset (CSTS.CFS).
    pub(crate) fn fail(&mut self, why: &'static str, deferred: &mut Deferred) {
        if !self.regs.csts.cfs() {
            self.regs.csts.set_cfs(true);
            tracing::warn!(why, "controller fatal status");
            deferred.event(Event::Fatal(why));
        }
    }

    /// CC.SHN: flushes what the disks hold back. The queues go on working.
    fn shut_down(&mut self, inner: &Inner, deferred: &mut Deferred) {
        self.regs.csts.set_shst(regs::SHST_OCCURRING);
        let generation = self.generation;
        let latch = inner.latch(move |inner, control, deferred| {
            if control.generation == generation {
                control.regs.csts.set_shst(regs::SHST_COMPLETE);
                deferred.event(Event::Shutdown);
                let _ = inner;
            }
        });
        for worker in self.workers() {
            let controller = inner.shared.id;
            inner.pool.send(worker, Message::Flush { controller, latch: latch.clone() });
        }
        deferred.latches.push(latch);
    }

    /// A Controller Level Reset begins: the shadow pages are dropped before anything else, the
    /// workers give up what is in flight, and the rest follows when they have.
    pub(crate) fn begin_reset(&mut self, inner: &Inner, full: bool, deferred: &mut Deferred) {
        if let Some(admin) = &mut self.admin {
            admin.drop_shadow();
        }
        self.shadow = None;
        self.kicks.clear();
        self.full_reset |= full;
        if self.phase == Phase::Resetting {
            return;
        }
        if self.phase == Phase::Ready
            && !self.sqs.is_empty()
            && self.regs.csts.shst() != regs::SHST_COMPLETE
            && full
        {
            self.unsafe_shutdowns += 1;
        }
        self.phase = Phase::Resetting;
        self.generation += 1;
        if let Some(admin) = self.admin.take() {
            admin.retire(&inner.shared);
        }
        let latch = inner.latch(|inner, control, deferred| control.end_reset(inner, deferred));
        for worker in self.workers() {
            let controller = inner.shared.id;
            inner.pool.send(worker, Message::Detach { controller, latch: latch.clone() });
        }
        deferred.latches.push(latch);
    }

    /// Nothing is in flight any more.
    fn end_reset(&mut self, inner: &Inner, deferred: &mut Deferred) {
        for qid in std::mem::take(&mut self.sqs).into_keys() {
            inner.shared.set_owner(qid, regs::DoorbellKind::Sq, None);
        }
        for (qid, record) in std::mem::take(&mut self.cqs) {
            inner.shared.set_owner(qid, regs::DoorbellKind::Cq, None);
            inner.pool.unplace(record.worker);
        }
        self.tenancies.clear();
        let doorbells = inner.shared.doorbells();
        let _ = doorbells.fill(0, doorbells.len(), 0);
        inner.shared.irqs.forget_pending();
        inner.shared.coalescing.reset();
        inner.shared.set_write_through(false);
        self.features.reset();
        self.granted = (inner.config.io_queues, inner.config.io_queues);
        self.events.clear();
        self.aborts = 0;
        self.phase = Phase::Disabled;
        self.regs.csts = Csts::new();
        let full = std::mem::take(&mut self.full_reset);
        if full {
            self.regs = Registers::default();
        }
        #[cfg(feature = "faults")]
        self.recover(inner);
        inner.note(crate::trace::Kind::Reset, 0, 0, 0);
        deferred.event(Event::Disabled);
        deferred.latches.append(&mut self.waiting);
        if self.regs.cc.en() {
            self.enable(inner, deferred);
        }
    }

    /// A reset from outside.
    pub(crate) fn reset(&mut self, inner: &Inner, latch: Latch) -> Deferred {
        let mut deferred = Deferred::default();
        #[cfg(feature = "faults")]
        self.overlay.function_reset();
        if self.phase == Phase::Disabled {
            self.regs = Registers::default();
            deferred.latches.push(latch);
        } else {
            self.waiting.push(latch);
            self.begin_reset(inner, true, &mut deferred);
        }
        deferred
    }

    pub(crate) fn map(
        &mut self,
        iova: u64,
        len: u64,
        memory: &SharedBytes,
    ) -> Result<(), DmaError> {
        self.space.map(iova, len, memory)
    }

    pub(crate) fn unmap(&mut self, iova: u64, len: u64) -> Result<(), DmaError> {
        self.space.unmap(iova, len)
    }

    pub(crate) fn unmap_all(&mut self) {
        self.space.clear();
    }

    /// Gives everybody the DMA map as it is now. `latch`, if somebody waits, is let go by each when nothing
    /// of it uses the old one any more. Whether the admin queue has to be served: it stood still for
    /// want of memory that is there now, and nobody rings again for what was rung meanwhile.
    pub(crate) fn publish_table(&mut self, inner: &Inner, latch: Option<&Latch>) -> bool {
        let table = Arc::clone(self.space.table());
        let shadow = self.shadow;
        let is_back = self.admin.as_mut().is_some_and(|admin| admin.remap(&table, shadow));
        for worker in self.workers() {
            let (controller, table) = (inner.shared.id, Arc::clone(&table));
            let latches = latch.into_iter().cloned().collect();
            inner.pool.send(worker, Message::Table { controller, table, latches });
        }
        is_back
    }

    /// The workers that serve this controller's queues.
    pub(crate) fn workers(&self) -> Vec<usize> {
        self.tenancies.iter().copied().collect()
    }

    pub(crate) fn admin_stats(&self, shared: &Shared) -> Stats {
        let mut stats = Stats::default();
        if let Some(admin) = &self.admin {
            let (sq, cq) = admin.snapshot(shared);
            stats.submission_queues.push(sq);
            stats.completion_queues.push(cq);
        }
        stats
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.phase == Phase::Ready && !self.regs.csts.cfs()
    }

    /// A doorbell register was written that no queue has.
    pub(crate) fn invalid_doorbell_register(&mut self, inner: &Inner) -> Deferred {
        let mut deferred = Deferred::default();
        if self.is_ready() {
            self.raise(inner, shadowbell_spec::event::AsyncEvent::INVALID_DOORBELL_REGISTER);
        }
        self.serve_admin(inner, &mut deferred);
        deferred
    }

    /// A worker found something.
    pub(crate) fn report(&mut self, inner: &Inner, report: Report) -> Deferred {
        let mut deferred = Deferred::default();
        match report {
            Report::InvalidDoorbell { qid } => {
                tracing::debug!(qid, "invalid doorbell value");
                if self.is_ready() {
                    self.raise(inner, shadowbell_spec::event::AsyncEvent::INVALID_DOORBELL_VALUE);
                }
            }
            Report::CommandError { sqid, cid, status, nsid, lba } => {
                self.log_error(sqid, cid, status, nsid, lba);
                if status.code() == Status::CAPACITY_EXCEEDED {
                    self.no_room(inner, nsid, &mut deferred);
                } else if status.code() == Status::WRITE_FAULT {
                    self.tell_losses(inner, &mut deferred);
                }
            }
            Report::MemoryLost => {
                self.fail("memory that the host shared was taken away (truncated)", &mut deferred);
            }
            #[cfg(feature = "faults")]
            Report::Fault(fault) => self.suffer(inner, fault, &mut deferred),
        }
        deferred
    }

    /// Serves the admin queue.
    pub(crate) fn service(&mut self, inner: &Inner) -> Deferred {
        let mut deferred = Deferred::default();
        self.serve_admin(inner, &mut deferred);
        deferred
    }
}

impl Inner {
    /// A latch that, when it is let go, goes on under the lock.
    pub(crate) fn latch(
        &self,
        then: impl FnOnce(&Inner, &mut Control, &mut Deferred) + Send + 'static,
    ) -> Latch {
        let me = self.me.clone();
        Latch::new(move || {
            let Some(inner) = me.upgrade() else { return };
            let mut deferred = Deferred::default();
            then(&inner, &mut inner.lock(), &mut deferred);
            inner.run(deferred);
        })
    }

    fn watch(&self) {
        use crate::worker::{Service, Watch};
        let service: std::sync::Weak<dyn Service> = self.me.clone();
        let tail = self.shared.register(0, regs::DoorbellKind::Sq);
        let head = self.shared.register(0, regs::DoorbellKind::Cq);
        self.pool.send(0, Message::Watch(Watch { tail, head, seen: (0, 0), service }));
    }
}
