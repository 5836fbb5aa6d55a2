//! The control plane of a controller: its registers, its admin commands, and what follows from
//! them.
//!
//! Everything here runs under one lock, which no worker ever takes, and under which nobody ever
//! waits. What takes time is sent to the workers as a message, and goes on when the last of them
//! drops its latch and so gives notice. The guest's memory is not touched under it either: that is
//! left to whoever serves the admin queue (`admin_server`), who gets [`Orders`].

mod admin;
mod admin_progress;
mod alone;
mod ana;
mod commands;
pub(crate) mod control_override;
mod deferred;
mod diagnostics;
mod dirty;
mod io_queues;
mod keep_alive;
mod memory;
mod namespace_changes;
mod namespaces;
mod one_alone;
mod pool;
mod pool_events;
mod recover;
mod registers;
mod reservations;
mod reset;
mod rest;
mod save;
mod shared_features;
mod tend;

pub(crate) use admin::{Attach, Data, Executed, Orders, Outcome};
pub(crate) use deferred::{Callback, Deferred};
pub use io_queues::DoorbellEventfds;
pub use namespace_changes::NamespaceError;
#[cfg(feature = "faults")]
pub(crate) use registers::RegisterImage;

use crate::context::Context;
use crate::control_thread::AdminDoorbellPoll;
use crate::event::Event;
use crate::inbox::MissedErrors;
use crate::inquiry::Inquiry;
use crate::latch::Latch;
use crate::notice::{Notice, Operation};
use crate::queue::admin::{AdminCompletion, AdminQueue};
use crate::route::RelocateError;
use crate::trace::Kind;
use crate::worker::message::Message;
use crate::worker::relocation::Departure;
use admin::AdminPort;
use commands::{AdminCommands, CommandEnvironment};
use control_override::{ControlOverride, Response};
use diagnostics::hours;
use io_queues::{IoQueues, QueueEnvironment, ended};
use memory::HostMemory;
use namespace_changes::NamespaceChanges;
use one_alone::OneAlone;
use registers::{Effect, Registers};
use reset::{Lifecycle, Phase, ShutdownFlush, Waiter};
use rest::{Rest, Step};
use shadowbell_memory::{DmaError, DmaTable, SharedBytes};
use shadowbell_spec::Sqe;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::regs::{self, Cc, Csts, DoorbellKind};
use shadowbell_spec::status::Status;
use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What whoever serves the admin queue has to know of the controller.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Standing {
    /// Commands are served.
    pub(crate) ready: bool,
    /// Commands are begun: the controller does not come to rest.
    pub(crate) begins: bool,
    /// It is at rest: the host's memory stays as it is.
    pub(crate) rests: bool,
    /// CC.MPS in bytes.
    pub(crate) page_size: usize,
}

/// The control plane. What has to outlive a process is in here; the rest is rebuilt from it.
pub(crate) struct Control {
    registers: Registers,
    lifecycle: Lifecycle,
    memory: HostMemory,
    port: AdminPort,
    commands: AdminCommands,
    queues: IoQueues,
    namespace_changes: NamespaceChanges,
    alone: OneAlone,
    overriding: Option<Box<dyn ControlOverride>>,
    rest: Rest,
}

impl Control {
    pub(crate) fn new(cx: &Context) -> Self {
        let mut commands = AdminCommands::new(&cx.config);
        commands.ana.begin(cx);
        Self {
            registers: Registers::new(cx.config.max_queue_entries),
            lifecycle: Lifecycle::new(),
            memory: HostMemory::new(cx.shared.id),
            port: AdminPort::default(),
            commands,
            queues: IoQueues::new(cx.config.io_queues),
            namespace_changes: NamespaceChanges::default(),
            alone: OneAlone::default(),
            overriding: None,
            rest: Rest::new(),
        }
    }

    /// From now on, something else answers for the controller.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    pub(crate) fn set_override(&mut self, cx: &Context, overriding: Box<dyn ControlOverride>) {
        cx.send_all(self.queues.workers(), |controller| Message::Override {
            controller,
            overriding: overriding.queues(),
        });
        self.overriding = Some(overriding);
    }

    /// What answers for the controller instead, if it is a `T`.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    pub(crate) fn overriding<T: Any>(&mut self) -> Option<&mut T> {
        let overriding: &mut dyn Any = self.overriding.as_deref_mut()?;
        overriding.downcast_mut()
    }

    /// Reads registers below the doorbells into `data`, which is all zeroes.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let mut image = self.registers.image();
        if let Some(overriding) = &self.overriding {
            overriding.read(&mut image);
        }
        if let Some(from) = usize::try_from(offset).ok().and_then(|o| image.get(o..)) {
            let n = from.len().min(data.len());
            data[..n].copy_from_slice(&from[..n]);
        }
    }

    /// Writes a register below the doorbells.
    pub(crate) fn write(&mut self, cx: &Context, offset: u64, data: &[u8]) -> Deferred {
        let mut deferred = Deferred::default();
        match *data {
            [a, b, c, d] => {
                self.write32(cx, offset, u32::from_le_bytes([a, b, c, d]), &mut deferred);
            }
            [a, b, c, d, e, f, g, h] if offset.is_multiple_of(8) => {
                self.write32(cx, offset, u32::from_le_bytes([a, b, c, d]), &mut deferred);
                self.write32(cx, offset + 4, u32::from_le_bytes([e, f, g, h]), &mut deferred);
            }
            _ => tracing::debug!(offset, len = data.len(), "ignored a register write"),
        }
        deferred
    }

    fn write32(&mut self, cx: &Context, offset: u64, value: u32, deferred: &mut Deferred) {
        if let Some(overriding) = &mut self.overriding
            && overriding.write(offset, value, self.registers.cc)
        {
            return;
        }
        match self.registers.write(offset, value) {
            Effect::None => {}
            Effect::Configuration(before) => self.configure(cx, before, deferred),
            Effect::AdminCompletionQueue(acq) => {
                if self.port.place_cq(acq) {
                    self.registers.acq = acq;
                } else {
                    tracing::debug!(offset, "ignored a write while the controller is enabled");
                }
            }
        }
    }

    /// CC was written.
    fn configure(&mut self, cx: &Context, old: Cc, deferred: &mut Deferred) {
        let new = self.registers.cc;
        match (old.en(), new.en()) {
            // Early, before RDY went to 0: it counts when the reset under way is over.
            (false, true) if self.lifecycle.phase == Phase::Disabled => self.enable(cx, deferred),
            (true, false) => self.begin_reset(cx, false, deferred),
            _ => {}
        }
        if new.shn() != regs::SHN_NONE && old.shn() != new.shn() {
            self.shut_down(cx, deferred);
        }
    }

    /// CC.EN went from 0 to 1 (Base 2.1, "Memory-based Controller Initialization").
    fn enable(&mut self, cx: &Context, deferred: &mut Deferred) {
        if let Err(why) = self.registers.check_enable() {
            return self.fail(cx, why, deferred);
        }
        let Registers { aqa, asq, acq, .. } = self.registers;
        let (table, generation) = (Arc::clone(self.memory.table()), self.lifecycle.generation);
        match AdminQueue::new(&cx.shared, &table, aqa, asq, acq) {
            Ok(queue) => {
                // Before it is recorded that there is one: what is written down is that of the
                // queue before the reset, whose doorbells may have been elsewhere.
                let journal = cx.shared.journal_part(0, generation).unwrap_or_default();
                if let Some(journal) = &journal {
                    queue.write_down(journal);
                }
                self.port.open(Attach { queue, table, generation, shadow: None });
            }
            Err(fault) => {
                tracing::warn!(%fault, "the admin queue's memory can not be reached");
                let why = "the admin queue is not in memory that the host shared";
                return self.fail(cx, why, deferred);
            }
        }
        self.lifecycle.phase = Phase::Ready;
        self.registers.csts = Csts::new().with_rdy(true);
        self.log_enabled();
        deferred.event(Event::Enabled);
        self.poll_admin_doorbells(cx);
    }

    /// Where nothing traps, somebody has to look.
    fn poll_admin_doorbells(&self, cx: &Context) {
        if cx.shared.mapped {
            let tail = cx.shared.register(0, DoorbellKind::Sq);
            let head = cx.shared.register(0, DoorbellKind::Cq);
            let poll = AdminDoorbellPoll::new(tail, head, cx.control.clone());
            cx.pool.control().poll_doorbells(cx.shared.id, Some(poll));
        }
    }

    /// Nothing goes on until the next reset (CSTS.CFS).
    fn fail(&mut self, cx: &Context, why: &'static str, deferred: &mut Deferred) {
        if !self.registers.csts.cfs() {
            self.registers.csts.set_cfs(true);
            tracing::warn!(why, "controller fatal status");
            self.log_fatal(cx, why);
            deferred.event(Event::Fatal(why));
        }
    }

    /// CC.SHN: flushes what the disks hold back. The queues go on working, if there are any; what
    /// was written before a reset counts as well.
    fn shut_down(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.registers.csts.set_shst(regs::SHST_OCCURRING);
        if self.lifecycle.flush != ShutdownFlush::None {
            self.lifecycle.flush = ShutdownFlush::Again;
            return;
        }
        self.lifecycle.flush = ShutdownFlush::UnderWay;
        if self.lifecycle.phase == Phase::Resetting {
            deferred.latches.push(cx.latch(ended(self.lifecycle.generation, Operation::Shutdown)));
            return;
        }
        let (registers, memory) = (&self.registers, &self.memory);
        let generation = self.lifecycle.generation;
        let env = QueueEnvironment { registers, memory, generation };
        let overriding = self.overriding.as_ref().map(|overriding| overriding.queues());
        self.queues.flush(cx, &env, Operation::Shutdown, overriding);
    }

    /// A worker has flushed for a controller that is disabled: nobody needs its queues.
    fn let_workers_go(&mut self, cx: &Context, deferred: &mut Deferred) {
        if self.lifecycle.phase != Phase::Disabled {
            return;
        }
        // Nobody waits for that: what ends is of a time before.
        let before = self.lifecycle.generation.wrapping_sub(1);
        let latch = cx.latch(ended(before, Operation::Reset));
        cx.send_all(self.queues.workers(), |controller| Message::Detach {
            controller,
            latch: latch.clone(),
        });
        self.queues.forget_workers();
        deferred.latches.push(latch);
    }

    /// A Controller Level Reset begins: the shadow pages are dropped before anything else, the
    /// workers give up what is in flight, and so does whoever serves the admin queue. The rest
    /// follows when they have.
    fn begin_reset(&mut self, cx: &Context, full: bool, deferred: &mut Deferred) {
        if self.rest.step == Step::Resting {
            // Its queues are at no worker, and nothing is in flight.
            self.rest.step = Step::Working;
            deferred.callbacks.push(Box::new(cx.route.give_up_rest()));
        }
        self.log_queues();
        self.memory.shadow = None;
        self.queues.drop_eventfds();
        self.forget_alone(cx);
        self.lifecycle.full_reset |= full;
        if self.lifecycle.phase == Phase::Resetting {
            return;
        }
        if self.lifecycle.phase == Phase::Ready
            && self.queues.has_sqs()
            && self.registers.csts.shst() != regs::SHST_COMPLETE
            && full
        {
            self.lifecycle.unsafe_shutdowns = self.lifecycle.unsafe_shutdowns.saturating_add(1);
        }
        let was_ready = self.lifecycle.phase == Phase::Ready;
        self.lifecycle.phase = Phase::Resetting;
        self.lifecycle.generation = self.lifecycle.generation.wrapping_add(1);
        self.lifecycle.flush = ShutdownFlush::None;
        let hours = hours(&self.lifecycle);
        self.commands.diagnostics.self_test.reset(hours);
        if cx.shared.mapped {
            cx.pool.control().poll_doorbells(cx.shared.id, None);
        }
        if !was_ready {
            // Enabling it had failed: nobody has anything to give up.
            return self.end_reset(cx, deferred);
        }
        let latch = cx.latch(ended(self.lifecycle.generation, Operation::Reset));
        self.port.close(latch.clone());
        let controller = cx.shared.id;
        cx.route.hurry(&cx.pool, || Message::Hurry { controller });
        let message = |controller| Message::Detach { controller, latch: latch.clone() };
        cx.send_all(self.queues.workers(), message);
        deferred.latches.push(latch);
    }

    /// The controller's turns take too long for its neighbours.
    fn too_slow(&mut self, cx: &Context, took: Duration, deferred: &mut Deferred) {
        match self.isolate(cx) {
            Ok(()) => {
                self.log_isolated(cx, took);
                deferred.event(Event::Isolated(took));
            }
            // It was isolated meanwhile, or is about to be served by another process.
            Err(RelocateError::Placed | RelocateError::Frozen) => {}
            Err(error) => tracing::warn!(
                serial = cx.config.serial,
                %error,
                "the controller holds up others for {took:?} at a time"
            ),
        }
    }

    /// Has the controller served by a thread of its own.
    pub(crate) fn isolate(&mut self, cx: &Context) -> Result<(), RelocateError> {
        self.check_relocation(cx)?;
        let worker = cx.pool.claim()?.ok_or(RelocateError::TooMany)?;
        self.relocate(cx, worker)
    }

    /// Has the controller served by this worker.
    pub(crate) fn pin_to(&mut self, cx: &Context, worker: usize) -> Result<(), RelocateError> {
        if worker >= cx.pool.len() {
            return Err(RelocateError::NoSuchWorker(worker, cx.pool.len()));
        }
        self.check_relocation(cx)?;
        self.relocate(cx, worker)
    }

    fn check_relocation(&self, cx: &Context) -> Result<(), RelocateError> {
        if self.rest.step != Step::Working {
            Err(RelocateError::Frozen)
        } else if cx.route.is_diverted() {
            Err(RelocateError::Placed)
        } else {
            Ok(())
        }
    }

    fn relocate(&mut self, cx: &Context, worker: usize) -> Result<(), RelocateError> {
        let Some(to) = cx.pool.destination(worker) else {
            return Err(RelocateError::NoSuchWorker(worker, cx.pool.len()));
        };
        cx.route.divert(&cx.pool, worker, self.queues.workers(), |from| {
            let latch = cx.latch(Notice::Relocated { from });
            let departure = Departure { to: to.clone(), latch };
            Message::Leave { controller: cx.shared.id, departure }
        });
        Ok(())
    }

    /// Has the controller come to rest; `done` is called when it does, or dropped if that is called
    /// off.
    pub(crate) fn begin_rest(&mut self, done: Callback) -> Deferred {
        let mut deferred = Deferred::default();
        if self.rest.step == Step::Resting {
            deferred.callbacks.push(done);
        } else {
            self.rest.waiting.push(done);
        }
        if self.rest.step == Step::Working {
            self.rest.step = Step::Asked;
        }
        deferred
    }

    /// Goes on towards a rest, if one was asked for. `admin_is_quiet`: no admin command is under
    /// way.
    pub(crate) fn advance_rest(
        &mut self,
        cx: &Context,
        admin_is_quiet: bool,
        deferred: &mut Deferred,
    ) {
        if self.rest.step != Step::Asked || !admin_is_quiet || !self.is_quiet(cx) {
            return;
        }
        self.rest.step = Step::Leaving;
        let (controller, latch) = (cx.shared.id, cx.latch(Notice::Left));
        cx.route.begin_rest(&cx.pool, self.queues.workers(), |to| {
            let departure = Departure { to, latch: latch.clone() };
            Message::Leave { controller, departure }
        });
        deferred.latches.push(latch);
    }

    /// Whether nobody waits for anything.
    fn is_quiet(&self, cx: &Context) -> bool {
        self.lifecycle.is_quiet()
            && !self.memory.is_awaited()
            && self.commands.is_quiet()
            && cx.lba_status.is_quiet()
            && self.queues.is_quiet()
            && self.namespace_changes.is_quiet()
            && self.alone.is_quiet()
            && !self.port.has_orders()
            && !cx.route.is_leaving()
    }

    /// The queues have left their workers.
    fn queues_left(&mut self, cx: &Context, deferred: &mut Deferred) {
        match self.rest.step {
            Step::Leaving => {
                self.rest.step = Step::Resting;
                deferred.callbacks.append(&mut self.rest.waiting);
            }
            Step::Returning => {
                cx.route.end_rest(&cx.pool);
                let is_wanted = !self.rest.waiting.is_empty();
                self.rest.step = if is_wanted { Step::Asked } else { Step::Working };
            }
            Step::Working | Step::Asked | Step::Resting => {}
        }
    }

    /// Has the controller go on here. Who has waited for its rest is returned, to be dropped
    /// without the lock.
    pub(crate) fn end_rest(&mut self, cx: &Context) -> Vec<Callback> {
        let controller = cx.shared.id;
        self.rest.step = match self.rest.step {
            Step::Working | Step::Asked => Step::Working,
            Step::Leaving | Step::Returning => {
                cx.route.call_off_rest(&cx.pool, || Message::Stay { controller });
                Step::Returning
            }
            Step::Resting => {
                cx.route.end_rest(&cx.pool);
                Step::Working
            }
        };
        std::mem::take(&mut self.rest.waiting)
    }

    /// Nothing is in flight any more.
    fn end_reset(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.queues.reset(cx);
        let doorbells = cx.shared.doorbells();
        let _ = doorbells.fill(0, doorbells.len(), 0);
        cx.shared.irqs.forget_pending();
        cx.shared.coalescing.reset();
        cx.shared.set_write_through(false);
        cx.shared.set_copy_formats(0);
        if let Some(member) = &cx.config.member {
            member.set_host(None);
        }
        self.commands.reset();
        self.commands.ana.begin(cx);
        deferred.latches.extend(cx.lba_status.forget());
        self.port.events.clear();
        self.lifecycle.reset_at = Instant::now();
        self.lifecycle.phase = Phase::Disabled;
        self.lifecycle.flush = ShutdownFlush::None;
        self.registers.reset();
        if std::mem::take(&mut self.lifecycle.full_reset) {
            self.registers.power_on();
        }
        if let Some(overriding) = &mut self.overriding {
            overriding.reset_ended();
        }
        cx.trace(Kind::Reset, 0, 0, 0);
        deferred.event(Event::Disabled);
        for waiter in std::mem::take(&mut self.lifecycle.waiting) {
            self.reset_is_over(cx, waiter, deferred);
        }
        if self.registers.cc.en() {
            self.enable(cx, deferred);
        }
    }

    /// Does what somebody wanted done after a reset.
    fn reset_is_over(&mut self, cx: &Context, waiter: Waiter, deferred: &mut Deferred) {
        match waiter {
            Waiter::Reset(done) => deferred.callbacks.push(done),
            Waiter::Disconnect(done) => {
                cx.shared.irqs.clear();
                self.unmap_all(cx, done, deferred);
            }
        }
    }

    /// A reset from outside.
    pub(crate) fn reset(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.reset_for(cx, Waiter::Reset(done))
    }

    /// The host is gone: a reset, after which its memory and its interrupts are forgotten.
    pub(crate) fn disconnect(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.reset_for(cx, Waiter::Disconnect(done))
    }

    fn reset_for(&mut self, cx: &Context, waiter: Waiter) -> Deferred {
        let mut deferred = Deferred::default();
        if let Some(overriding) = &mut self.overriding {
            overriding.function_reset();
        }
        if self.lifecycle.phase == Phase::Disabled {
            if self.rest.step == Step::Resting {
                self.rest.step = Step::Working;
                deferred.callbacks.push(Box::new(cx.route.give_up_rest()));
            }
            self.registers.power_on();
            self.reset_is_over(cx, waiter, &mut deferred);
        } else {
            self.lifecycle.waiting.push(waiter);
            self.begin_reset(cx, true, &mut deferred);
        }
        deferred
    }

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

    fn release_memory(&mut self, cx: &Context, done: Callback, deferred: &mut Deferred) {
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

    /// Descriptors that stand for writes to doorbells: none without Doorbell Buffer Config.
    ///
    /// # Errors
    /// The system's, when it has no more descriptors.
    pub(crate) fn doorbell_eventfds(&mut self, cx: &Context) -> io::Result<DoorbellEventfds> {
        if self.memory.shadow.is_none() || cx.shared.mapped {
            return Ok(DoorbellEventfds::default());
        }
        self.queues.doorbell_eventfds(cx)
    }

    fn is_ready(&self) -> bool {
        self.lifecycle.phase == Phase::Ready && !self.registers.csts.cfs()
    }

    /// A doorbell register was written that no queue has.
    pub(crate) fn invalid_doorbell_register(&mut self) {
        if self.is_ready() {
            self.port.doorbell_error(AsyncEvent::INVALID_DOORBELL_REGISTER);
        }
    }

    /// An admin doorbell has a value that can not be.
    pub(crate) fn bad_admin_doorbell(&mut self) {
        if self.is_ready() {
            self.port.doorbell_error(AsyncEvent::INVALID_DOORBELL_VALUE);
        }
    }

    /// There were errors of which no notice is left.
    pub(crate) fn receive_missed(
        &mut self,
        cx: &Context,
        missed: &MissedErrors,
        deferred: &mut Deferred,
    ) {
        self.port.errors.skip(missed.count);
        let full = missed.full.iter().map(|nsid| (*nsid, Status::CAPACITY_EXCEEDED));
        for failed in full.chain(missed.write_fault) {
            self.commands.command_failed(cx, failed, deferred);
        }
    }

    /// A worker has given notice.
    pub(crate) fn receive(&mut self, cx: &Context, notice: Notice, deferred: &mut Deferred) {
        match notice {
            Notice::InvalidDoorbell { qid } => {
                tracing::debug!(qid, "invalid doorbell value");
                if self.is_ready() {
                    self.port.doorbell_error(AsyncEvent::INVALID_DOORBELL_VALUE);
                }
            }
            Notice::CommandError { sqid, cid, status, nsid, lba } => {
                self.port.log_error(sqid, cid, status, nsid, lba);
                let failed = (nsid, status);
                self.commands.command_failed(cx, failed, deferred);
            }
            Notice::MemoryLost => {
                let why = "memory that the host shared was taken away (truncated)";
                self.fail(cx, why, deferred);
            }
            Notice::Condition(condition) => {
                let ready = self.is_ready();
                let response = self.overriding.as_mut().map(|o| o.condition(condition, ready));
                match response.unwrap_or(Response::Nothing) {
                    Response::Nothing => {}
                    Response::Fail(why) => self.fail(cx, why, deferred),
                    Response::Reset => self.begin_reset(cx, true, deferred),
                }
            }
            // Before a reset is over nobody waits for anything.
            Notice::WantsToBeAlone if self.is_ready() => self.alone.want(),
            Notice::WantsToBeAlone => {}
            Notice::AdminDoorbell => {}
            Notice::SlowTurns { took } => self.too_slow(cx, took, deferred),
            Notice::Relocated { from } => cx.route.arrived(&cx.pool, from),
            Notice::Left => self.queues_left(cx, deferred),
            Notice::Stranded => {
                self.fail(cx, "a thread of its own could not take over its queues", deferred);
            }
            Notice::NamespaceChanged { nsid, status } => {
                self.namespace_changed(cx, nsid, status, deferred);
            }
            Notice::PoolEnded { generation, cid, status, dw0 } => {
                self.pool_ended(cx, (generation, cid), (status, dw0), deferred);
            }
            Notice::Sanitized => self.sanitized(cx, deferred),
            Notice::Shared => self.pass_on_changes(cx, deferred),
            Notice::ReservationEnded { ticket, status } => {
                self.end_reservation(cx, ticket, status);
            }
            Notice::AnaChanged { ticket } => self.ana_changed(ticket, deferred),
            Notice::MemoryReleased { ticket } => {
                deferred.callbacks.extend(self.memory.released(ticket));
            }
            // What began before a reset concerns nobody.
            Notice::Ended { generation, .. } if generation != self.lifecycle.generation => {}
            Notice::Ended { operation, status, .. } => {
                self.operation_ended(cx, operation, status, deferred);
            }
        }
    }

    /// All workers that took part in `operation` are done with it.
    fn operation_ended(
        &mut self,
        cx: &Context,
        operation: Operation,
        status: Status,
        deferred: &mut Deferred,
    ) {
        let (queues, port) = (&mut self.queues, &mut self.port);
        match operation {
            Operation::CreateCq { qid, cid } => queues.cq_created(cx, port, (qid, cid), status),
            Operation::CreateSq { qid, cid } => {
                queues.sq_created(cx, port, (qid, cid), status, deferred);
            }
            Operation::DeleteCq { qid, cid } => queues.cq_deleted(cx, port, (qid, cid)),
            Operation::DeleteSq { qid, cid } => queues.sq_deleted(cx, port, (qid, cid)),
            Operation::ShadowDoorbells { cid } => {
                self.commands.shadow_configured(port, cid);
                cx.trace(Kind::ShadowConfigured, 0, 0, 0);
                deferred.event(Event::ShadowDoorbells);
            }
            Operation::Abort { cid } => self.commands.abort_ended(port, cid, status),
            Operation::LbaStatus { cid } => self.commands.lba_status_ended(cx, port, cid),
            // Without the cache, writes that come now are on the medium in any case.
            Operation::Flush { cid } | Operation::Feature { cid } if status.is_success() => {
                port.complete(cid, status, 0);
            }
            Operation::Flush { cid } | Operation::Feature { cid } => port.fail(cid, status, 0),
            Operation::Pause | Operation::Alone => self.next_alone(cx, deferred),
            Operation::Recorded => self.alone_recorded(cx, deferred),
            Operation::Settled => self.alone_settled(cx),
            Operation::SelfTest { run, nsid } => self.verified(cx, (run, nsid), status),
            Operation::Shutdown => {
                let flush = std::mem::replace(&mut self.lifecycle.flush, ShutdownFlush::None);
                match flush {
                    ShutdownFlush::None => {}
                    ShutdownFlush::Again => self.shut_down(cx, deferred),
                    ShutdownFlush::UnderWay => {
                        self.let_workers_go(cx, deferred);
                        self.registers.csts.set_shst(regs::SHST_COMPLETE);
                        deferred.event(Event::Shutdown);
                    }
                }
            }
            Operation::Reset => self.end_reset(cx, deferred),
        }
    }

    /// The commands, and what they may touch.
    fn split<'a>(
        &'a mut self,
        cx: &'a Context,
        deferred: &'a mut Deferred,
    ) -> (&'a mut AdminCommands, CommandEnvironment<'a>) {
        let env = CommandEnvironment {
            cx,
            registers: &self.registers,
            lifecycle: &self.lifecycle,
            memory: &mut self.memory,
            port: &mut self.port,
            queues: &mut self.queues,
            overriding: self.overriding.as_deref_mut(),
            deferred,
        };
        (&mut self.commands, env)
    }

    /// What somebody other than the host asks for.
    pub(crate) fn inquire(&mut self, cx: &Context, inquiry: Inquiry) -> Result<Vec<u8>, Status> {
        let mut deferred = Deferred::default();
        let (commands, mut env) = self.split(cx, &mut deferred);
        commands.inquire(&mut env, inquiry)
    }

    /// How many bytes an admin command takes from the host, to be read before it is executed.
    pub(crate) fn data_length(sqe: &Sqe) -> usize {
        AdminCommands::data_length(sqe)
    }

    /// Whether there is something to do for whoever serves the admin queue.
    pub(crate) fn has_admin_orders(&self) -> bool {
        self.port.has_orders()
    }

    /// What there is to do for whoever serves the admin queue, who `has_fetched` a command or not.
    pub(crate) fn admin_orders(&mut self, has_fetched: bool) -> (Orders, Standing) {
        let orders = self.port.take_orders(has_fetched);
        let (ready, begins) = (self.is_ready(), self.rest.step == Step::Working);
        let rests = self.rest.step == Step::Resting;
        (orders, Standing { ready, begins, rests, page_size: self.registers.page_size() })
    }

    /// Executes an admin command that was fetched after so many resets; `data` is what it takes
    /// from the host, or why that can not be had. `None` if a reset has begun since, or nothing
    /// goes on until one does: the command concerns nobody.
    pub(crate) fn execute(
        &mut self,
        cx: &Context,
        generation: u64,
        sqe: &Sqe,
        data: Option<Result<Vec<u8>, Status>>,
        deferred: &mut Deferred,
    ) -> Option<Executed> {
        if generation != self.lifecycle.generation || !self.is_ready() {
            return None;
        }
        self.log_queues();
        let (commands, mut env) = self.split(cx, deferred);
        let executed = commands.execute(&mut env, sqe, data);
        if !matches!(executed, Ok(Outcome::NotYet)) {
            let entries = u32::from(self.registers.aqa.asqs()) + 1;
            self.port.progress.begin(sqe, entries, !matches!(executed, Ok(Outcome::Unplaced)));
        }
        if let Err(status) = &executed {
            self.admin_failed(sqe, *status);
        }
        Some(executed)
    }

    /// Whoever serves the admin queue has completed a command.
    pub(crate) fn admin_ended(&mut self, generation: u64, completion: AdminCompletion) {
        if generation == self.lifecycle.generation {
            self.port.progress.end(completion);
        }
    }

    /// The completions of these admin commands are posted, and the completion queue is there.
    pub(crate) fn admin_posted(&mut self, at: (u16, bool), cids: &[u16]) {
        self.port.progress.posted(at, cids);
    }

    /// The data of an admin command could not be given to the host.
    pub(crate) fn admin_data_failed(&mut self, generation: u64, sqe: &Sqe, status: Status) {
        if generation == self.lifecycle.generation {
            self.admin_failed(sqe, status);
        }
    }

    fn admin_failed(&mut self, sqe: &Sqe, status: Status) {
        tracing::debug!(opcode = sqe.opcode, nsid = sqe.nsid, %status, "admin command");
        self.port.log_error(0, sqe.cid, status, sqe.nsid, 0);
    }

    /// The host has a log page, and wants to keep the event that belongs to it, or not.
    pub(crate) fn log_was_read(&mut self, generation: u64, (lid, keeps_event): (u8, bool)) {
        if generation == self.lifecycle.generation {
            let completion = self.port.events.log_read(lid, keeps_event);
            self.port.complete_event(completion);
        }
    }

    /// A command has come that can not be completed.
    pub(crate) fn lacks_admin_cq(&mut self, cx: &Context, deferred: &mut Deferred) {
        let why = "the admin completion queue is not in memory that the host shared";
        self.fail(cx, why, deferred);
    }
}
