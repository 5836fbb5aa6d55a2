//! Control plane of a controller: registers, admin commands and their effects.
//!
//! One lock protects the whole module. I/O threads never take it, and code that holds it never
//! waits. A long operation sends a message to the I/O threads; when the last of them drops its
//! clone of the operation's latch, a notice is sent, and the operation continues. Guest memory is
//! not accessed under the lock, but only by the admin queue server (`admin_server`), to which the
//! control plane sends [`Orders`].
//!
//! The type [`Control`] has its methods in four files: this one (construction, admin commands,
//! notices from I/O threads, memory map changes, exclusive commands, background work), `lifecycle`,
//! `namespaces` and `checkpoint`.
//!
//! # Exclusive commands
//!
//! While an [exclusive command](crate::exec) runs, no other command of the controller runs.
//!
//! First, the I/O threads stop fetching and let commands in flight end. Then each I/O thread
//! executes its waiting exclusive commands, one I/O thread after the other. Finally, changes are
//! checkpointed and all I/O threads resume. The messages for these steps are sent to all I/O
//! threads that may have queues of the controller, even while the controller moves or quiesces. An
//! I/O thread that receives a moved queue checks `ControllerShared::is_exclusive`. The admin budget
//! (`control_plane`) limits a host that repeats exclusive commands.

mod admin_port;
mod checkpoint;
mod commands;
mod diagnostics;
mod io_queues;
mod lifecycle;
mod lifecycle_state;
mod log_pages;
mod memory;
mod namespace_state;
mod namespaces;
mod pool;
pub(crate) mod registers;
mod shared_features;

pub(crate) use admin_port::{Attach, Data, Executed, Orders, Outcome};
pub use io_queues::DoorbellEventfds;
pub(crate) use lifecycle_state::{Callback, Deferred};
pub use namespace_state::NamespaceError;
#[cfg(feature = "faults")]
pub(crate) use registers::RegisterImage;

use crate::admin::OutOfBandCommand;
use crate::admin::persistent_events::{EventContext, FATAL, ISOLATED, RECOVERED, VendorEventCode};
use crate::context::Context;
use crate::event::Event;
use crate::notice::{Latch, MissedErrors, Notice, Operation};
use crate::queue::admin::AdminCompletion;
use crate::trace::Kind;
use crate::worker::mailbox::Message;
use admin_port::AdminPort;
use commands::{AdminCommands, CommandEnvironment};
use diagnostics::{hours, media, summary};
use io_queues::{IoQueues, QueueEnvironment, ended_notice};
use lifecycle_state::{Exclusive, Lifecycle, Phase, Quiesce, Shutdown, Stage, Step};
use memory::HostMemory;
use namespace_state::NamespaceChanges;
use registers::{ControlOverride, Effect, Registers, Response};
use shadowbell_memory::{DmaError, DmaTable, SharedBytes};
use shadowbell_spec::Sqe;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::status::Status;
use std::any::Any;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Controller state for the admin queue server.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Standing {
    /// True if commands are served.
    pub(crate) ready: bool,
    /// True if new commands may start, because no quiesce is requested.
    pub(crate) accepts_commands: bool,
    /// True if the controller is quiesced. Host memory must then not be written.
    pub(crate) quiesced: bool,
    /// CC.MPS in bytes.
    pub(crate) page_size: usize,
}

/// Control plane of a controller. `SavedControl` contains the part of its state that survives the
/// process. The next process rebuilds the rest of the state from `SavedControl`.
pub(crate) struct Control {
    registers: Registers,
    lifecycle: Lifecycle,
    memory: HostMemory,
    port: AdminPort,
    commands: AdminCommands,
    queues: IoQueues,
    namespace_changes: NamespaceChanges,
    exclusive: Exclusive,
    overriding: Option<Box<dyn ControlOverride>>,
    quiesce: Quiesce,
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
            exclusive: Exclusive::default(),
            overriding: None,
            quiesce: Quiesce::new(),
        }
    }

    /// Sets an override of registers, admin commands and queues.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    pub(crate) fn set_override(&mut self, cx: &Context, overriding: Box<dyn ControlOverride>) {
        cx.send_all(self.queues.workers(), |controller| Message::Override {
            controller,
            overriding: overriding.queues(),
        });
        self.overriding = Some(overriding);
    }

    /// The current override, if it is a `T`.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    pub(crate) fn overriding<T: Any>(&mut self) -> Option<&mut T> {
        let overriding: &mut dyn Any = self.overriding.as_deref_mut()?;
        overriding.downcast_mut()
    }

    /// Value of CC.EN.
    pub(crate) fn is_enabled(&self) -> bool {
        self.registers.cc.en()
    }

    /// Reads registers below the doorbells into `data`. The caller passes a buffer of zeroes.
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
                if self.port.set_cq_address(acq) {
                    self.registers.acq = acq;
                } else {
                    tracing::debug!(offset, "ignored a write while the controller is enabled");
                }
            }
        }
    }

    /// Enters a fatal state (CSTS.CFS), which only a reset ends.
    fn fail(&mut self, cx: &Context, why: &'static str, deferred: &mut Deferred) {
        if !self.registers.csts.cfs() {
            self.registers.csts.set_cfs(true);
            tracing::warn!(why, "controller fatal status");
            self.log_fatal(cx, why);
            deferred.event(Event::Fatal(why));
        }
    }

    /// Doorbell eventfds. There are none without Doorbell Buffer Config.
    ///
    /// # Errors
    /// The error of the system if no more file descriptors are available.
    pub(crate) fn doorbell_eventfds(&mut self, cx: &Context) -> io::Result<DoorbellEventfds> {
        if self.memory.shadow.is_none() || cx.shared.mapped {
            return Ok(DoorbellEventfds::default());
        }
        self.queues.doorbell_eventfds(cx)
    }

    fn is_ready(&self) -> bool {
        self.lifecycle.phase == Phase::Ready && !self.registers.csts.cfs()
    }

    /// Reports a write to a doorbell register without a queue.
    pub(crate) fn invalid_doorbell_register(&mut self) {
        if self.is_ready() {
            self.port.doorbell_error(AsyncEvent::INVALID_DOORBELL_REGISTER);
        }
    }

    /// Reports an invalid doorbell value.
    pub(crate) fn invalid_doorbell_value(&mut self) {
        if self.is_ready() {
            self.port.doorbell_error(AsyncEvent::INVALID_DOORBELL_VALUE);
        }
    }

    /// Splits `self` into the admin commands and the state that they may access.
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

    /// Executes an out-of-band admin command.
    pub(crate) fn out_of_band(
        &mut self,
        cx: &Context,
        command: OutOfBandCommand,
    ) -> Result<Vec<u8>, Status> {
        let mut deferred = Deferred::default();
        let (commands, mut env) = self.split(cx, &mut deferred);
        commands.out_of_band(&mut env, command)
    }
}

/// Execution of admin commands for the admin queue server.
impl Control {
    /// Length of the data that an admin command takes from the host. The data are read before the
    /// command is executed.
    pub(crate) fn data_length(sqe: &Sqe) -> usize {
        AdminCommands::data_length(sqe)
    }

    /// Number of resets before the commands in flight were fetched. A reset that still waits for
    /// these commands is not counted.
    pub(crate) fn commands_generation(&self) -> u64 {
        let is_waiting = self.lifecycle.phase == Phase::Resetting;
        self.lifecycle.generation.wrapping_sub(u64::from(is_waiting))
    }

    /// True if the admin queue server has orders.
    pub(crate) fn has_admin_orders(&self) -> bool {
        self.port.has_orders()
    }

    /// Takes the orders for the admin queue server. `has_fetched` is true if the server has fetched
    /// a command.
    pub(crate) fn admin_orders(&mut self, has_fetched: bool) -> (Orders, Standing) {
        let orders = self.port.take_orders(has_fetched);
        let (ready, accepts_commands) = (self.is_ready(), self.quiesce.step == Step::Running);
        let quiesced = self.quiesce.step == Step::Quiesced;
        (
            orders,
            Standing { ready, accepts_commands, quiesced, page_size: self.registers.page_size() },
        )
    }

    /// Executes an admin command that was fetched in reset generation `generation`. `data` are the
    /// data from the host, or the error that occurred when they were read. Returns `None` if the
    /// command is dropped, because a reset has started since or the controller is in a fatal state.
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
            self.port.checkpoint.begin(sqe, entries, !matches!(executed, Ok(Outcome::Unplaced)));
        }
        if let Err(status) = &executed {
            self.admin_failed(sqe, *status);
        }
        Some(executed)
    }

    /// Marks a command as completed. The admin queue server calls this.
    pub(crate) fn admin_ended(&mut self, generation: u64, completion: AdminCompletion) {
        if generation == self.lifecycle.generation {
            self.port.checkpoint.end(completion);
        }
    }

    /// Marks completions as posted, with the completion queue's tail and phase after them.
    pub(crate) fn admin_posted(&mut self, at: (u16, bool), cids: &[u16]) {
        self.port.checkpoint.posted(at, cids);
    }

    /// Logs that the data of an admin command could not be written to host memory.
    pub(crate) fn admin_data_failed(&mut self, generation: u64, sqe: &Sqe, status: Status) {
        if generation == self.lifecycle.generation {
            self.admin_failed(sqe, status);
        }
    }

    fn admin_failed(&mut self, sqe: &Sqe, status: Status) {
        tracing::debug!(opcode = sqe.opcode, nsid = sqe.nsid, %status, "admin command");
        self.port.log_error(0, sqe.cid, status, sqe.nsid, 0);
    }

    /// Clears the event of a log page that the host has read, unless the event is retained.
    pub(crate) fn log_was_read(&mut self, generation: u64, (lid, keeps_event): (u8, bool)) {
        if generation == self.lifecycle.generation {
            let completion = self.port.events.log_read(lid, keeps_event);
            self.port.complete_event(completion);
        }
    }

    /// Enters a fatal state, because the admin completion queue cannot be written and no command
    /// can complete.
    pub(crate) fn lacks_admin_cq(&mut self, cx: &Context, deferred: &mut Deferred) {
        let why = "the admin completion queue is not in memory that the host shared";
        self.fail(cx, why, deferred);
    }
}

/// Notices from I/O threads.
impl Control {
    /// Handles errors whose notices were discarded because there were too many.
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

    /// Handles a notice from an I/O thread.
    pub(crate) fn receive(&mut self, cx: &Context, notice: Notice, deferred: &mut Deferred) {
        match notice {
            Notice::InvalidDoorbell { qid } => {
                tracing::debug!(qid, "invalid doorbell value");
                self.invalid_doorbell_value();
            }
            Notice::CommandError { sqid, cid, status, nsid, lba } => {
                self.port.log_error(sqid, cid, status, nsid, lba);
                let failed = (nsid, status);
                self.commands.command_failed(cx, failed, deferred);
            }
            Notice::MemoryLost => {
                let why = "host memory was truncated while it was mapped";
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
            // If the controller is not ready, a reset or shutdown has dropped the commands that
            // waited for exclusive execution.
            Notice::ExclusiveRequested if self.is_ready() => self.exclusive.request(),
            Notice::ExclusiveRequested => {}
            Notice::AdminDoorbell => {}
            Notice::SlowTurns { took } => self.too_slow(cx, took, deferred),
            Notice::Relocated { from } => cx.route.send_deferred(&cx.pool, from),
            Notice::QueuesDetached => self.queues_detached(cx, deferred),
            Notice::Stranded => {
                self.fail(cx, "the dedicated I/O thread could not take over the queues", deferred);
            }
            Notice::NamespaceChanged { nsid, status } => {
                self.namespace_changed(cx, nsid, status, deferred);
            }
            Notice::PoolEnded { generation, cid, status, dw0 } => {
                self.pool_ended(cx, (generation, cid), (status, dw0), deferred);
            }
            Notice::Sanitized => self.sanitized(cx, deferred),
            Notice::Shared => self.forward_changes(cx, deferred),
            Notice::ReservationEnded { ticket, status } => {
                self.end_reservation(cx, ticket, status);
            }
            Notice::AnaChanged { ticket } => self.ana_changed(ticket, deferred),
            Notice::MemoryReleased { ticket } => {
                deferred.callbacks.extend(self.memory.released(ticket));
            }
            // Operations from before a reset are ignored.
            Notice::Ended { generation, .. } if generation != self.lifecycle.generation => {}
            Notice::Ended { operation, status, .. } => {
                self.operation_ended(cx, operation, status, deferred);
            }
        }
    }

    /// Continues `operation`: all I/O threads have finished their parts of it.
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
            // For Set Features (Volatile Write Cache): the cache is already off, and the flush was
            // for the writes from before it was switched off.
            Operation::Flush { cid } | Operation::Feature { cid } if status.is_success() => {
                port.complete(cid, status, 0);
            }
            Operation::Flush { cid } | Operation::Feature { cid } => port.fail(cid, status, 0),
            Operation::Pause | Operation::Exclusive => self.next_exclusive(cx, deferred),
            Operation::Recorded => self.exclusive_recorded(cx, deferred),
            Operation::DecisionsJournaled => self.end_exclusive_round(cx),
            Operation::SelfTest { run, nsid } => self.verified(cx, (run, nsid), status),
            Operation::Shutdown => self.continue_shutdown(cx, deferred),
            Operation::Reset => self.end_reset(cx, deferred),
        }
    }
}

/// Background work for diagnostics: self-test pieces, SMART / Health snapshots and persistent
/// events.
impl Control {
    fn event_context(&self) -> EventContext {
        self.commands.event_context(&self.lifecycle)
    }

    /// Adds a Power-on or Reset event to the persistent event log.
    fn log_enabled(&mut self) {
        let context = self.event_context();
        self.commands.diagnostics.events.enabled(&context);
    }

    /// Adds a vendor-specific persistent event, captures controller-initiated telemetry and raises
    /// the telemetry event.
    fn log_vendor_event(&mut self, cx: &Context, vendor_event: VendorEventCode, text: &str) {
        let context = self.event_context();
        let stats = cx.shared.stats(|_| None);
        let diagnostics = &mut self.commands.diagnostics;
        diagnostics.events.add_vendor_event(&context, vendor_event, text);
        let (errors, events) = (&self.port.errors, diagnostics.events.len());
        let summary = summary(&cx.config, &self.lifecycle, errors, &stats, events);
        let reason = format!("{}: {text}", vendor_event.1);
        diagnostics.telemetry.capture_controller_initiated(&reason, &summary.unwrap_or_default());
        self.port.raise(AsyncEvent::TELEMETRY_LOG_CHANGED);
    }

    fn log_fatal(&mut self, cx: &Context, why: &str) {
        self.log_vendor_event(cx, FATAL, why);
    }

    fn log_recovered(&mut self, cx: &Context) {
        self.log_vendor_event(cx, RECOVERED, "recovered by a new process after a crash");
    }

    fn log_isolated(&mut self, cx: &Context, took: Duration) {
        let text = format!("a pass took {took:?}: moved to a dedicated I/O thread");
        self.log_vendor_event(cx, ISOLATED, &text);
    }

    /// Runs background work that is due: a self-test piece or a health snapshot. Returns true if
    /// any was due.
    pub(crate) fn run_background(
        &mut self,
        cx: &Context,
        now: Instant,
        deferred: &mut Deferred,
    ) -> bool {
        if !self.is_ready() || self.quiesce.step != Step::Running {
            return false;
        }
        let wants_snapshot = self.commands.diagnostics.events.wants_snapshot(now);
        if wants_snapshot {
            let (commands, env) = self.split(cx, deferred);
            let health = commands.health_page(&env);
            let context = commands.event_context(env.lifecycle);
            commands.diagnostics.events.snapshot(&context, &health, now);
        }
        let hours = hours(&self.lifecycle);
        let self_test = &mut self.commands.diagnostics.self_test;
        if self_test.next_at().is_none_or(|at| at > now) {
            return wants_snapshot;
        }
        if let Some(piece) = self_test.next(&media(cx), now, hours) {
            let operation = Operation::SelfTest { run: self_test.run(), nsid: piece.nsid };
            let (registers, memory) = (&self.registers, &self.memory);
            let generation = self.lifecycle.generation;
            let env = QueueEnvironment { registers, memory, generation };
            let overriding = self.overriding.as_ref().map(|overriding| overriding.queues());
            self.queues.verify(cx, &env, piece, operation, overriding);
        }
        true
    }

    /// Time when the next background work is due.
    fn next_due(&self) -> Option<Instant> {
        let works = self.is_ready() && self.quiesce.step == Step::Running;
        let diagnostics = &self.commands.diagnostics;
        let due = [diagnostics.self_test.next_at(), diagnostics.events.snapshot_due()];
        due.into_iter().flatten().min().filter(|_| works)
    }

    /// Stores the result of a verified self-test piece.
    fn verified(&mut self, cx: &Context, (run, nsid): (u32, u32), status: Status) {
        let shift = cx.serving().get(nsid).map_or(0, |namespace| namespace.block_shift());
        let self_test = &mut self.commands.diagnostics.self_test;
        self_test.verified(run, status, shift, Instant::now());
    }
}

/// Exclusive commands: coordination of the I/O threads.
impl Control {
    /// True if exclusive commands are waiting or running.
    pub(crate) fn has_exclusive(&self) -> bool {
        !self.exclusive.is_idle()
    }

    /// Starts a round of exclusive commands, if one is requested and none is running.
    pub(crate) fn advance_exclusive(&mut self, cx: &Context, deferred: &mut Deferred) {
        let quiesced = self.quiesce.step == Step::Quiesced;
        if self.exclusive.stage != Stage::Nothing
            || !self.exclusive.is_requested
            || !self.is_ready()
            || quiesced
        {
            return;
        }
        let workers = cx.route.everywhere(self.queues.workers());
        self.exclusive = Exclusive {
            is_requested: false,
            stage: Stage::Pausing,
            left: workers.clone(),
            workers,
            marks: cx.shared.uncorrectable(),
        };
        cx.shared.set_exclusive(true);
        let latch = cx.latch(ended_notice(self.lifecycle.generation, Operation::Pause));
        for worker in &self.exclusive.workers {
            let (controller, latch) = (cx.shared.id, latch.clone());
            cx.pool.send(*worker, Message::Pause { controller, latch });
        }
        deferred.latches.push(latch);
    }

    /// Starts the next step of the round, after the pause or after an I/O thread's turn: the turn
    /// of the next I/O thread, or the checkpoint.
    fn next_exclusive(&mut self, cx: &Context, deferred: &mut Deferred) {
        let next = self.exclusive.left.pop();
        let (stage, operation) = match next {
            Some(_) => (Stage::Executing, Operation::Exclusive),
            None => (Stage::Recording, Operation::Recorded),
        };
        self.exclusive.stage = stage;
        let latch = cx.latch(ended_notice(self.lifecycle.generation, operation));
        if let Some(worker) = next {
            let (controller, latch) = (cx.shared.id, latch.clone());
            cx.pool.send(worker, Message::RunExclusive { controller, latch });
        }
        // The latch is dropped after the checkpoint. So the notice arrives when the checkpoint is
        // stored.
        deferred.latches.push(latch);
    }

    /// Continues the round after the checkpoint. If commands have changed the marked blocks, the
    /// I/O threads first write the outcomes of these commands to the journal. A recovery would
    /// repeat the commands otherwise.
    fn exclusive_recorded(&mut self, cx: &Context, deferred: &mut Deferred) {
        if Arc::ptr_eq(&self.exclusive.marks, &cx.shared.uncorrectable()) {
            return self.end_exclusive_round(cx);
        }
        let latch =
            cx.latch(ended_notice(self.lifecycle.generation, Operation::DecisionsJournaled));
        for worker in &self.exclusive.workers {
            let (controller, latch) = (cx.shared.id, latch.clone());
            cx.pool.send(*worker, Message::JournalDecisions { controller, latch });
        }
        deferred.latches.push(latch);
    }

    /// Ends the round. All I/O threads resume.
    fn end_exclusive_round(&mut self, cx: &Context) {
        self.exclusive.marks = Arc::default();
        self.exclusive.stage = Stage::Nothing;
        cx.shared.set_exclusive(false);
        // Queues that moved to another I/O thread during the round are paused on that thread as
        // well.
        self.exclusive.workers.clear();
        for worker in cx.route.everywhere(self.queues.workers()) {
            cx.pool.send(worker, Message::EndExclusive { controller: cx.shared.id });
        }
    }

    /// Drops the current round and all requests for a round, at a reset or shutdown.
    fn drop_exclusive(&mut self, cx: &Context) {
        self.exclusive = Exclusive::default();
        cx.shared.set_exclusive(false);
    }
}

/// Changes of the host's memory map.
impl Control {
    /// Maps memory. The caller must call [`publish_table`](Self::publish_table) afterwards.
    pub(crate) fn map(
        &mut self,
        iova: u64,
        len: u64,
        memory: &SharedBytes,
    ) -> Result<(), DmaError> {
        self.memory.map(iova, len, memory)
    }

    /// Unmaps a range. `done` is called when no thread uses the range any more.
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

    /// Unmaps all ranges. `done` is called when no thread uses them any more.
    pub(crate) fn unmap_all(&mut self, cx: &Context, done: Callback, deferred: &mut Deferred) {
        self.memory.unmap_all();
        self.release_memory(cx, done, deferred);
    }

    /// Enables access to host memory. The caller must call [`publish_table`](Self::publish_table)
    /// afterwards.
    pub(crate) fn enable_memory(&mut self) {
        self.memory.enable(true);
    }

    /// Disables access to host memory; the maps stay. `done` is called when no thread uses host
    /// memory any more.
    pub(crate) fn disable_memory(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.memory.enable(false);
        let mut deferred = Deferred::default();
        self.release_memory(cx, done, &mut deferred);
        deferred
    }

    /// DMA table of all maps, even while access is disabled.
    pub(crate) fn mapped(&self) -> &Arc<DmaTable> {
        self.memory.all()
    }

    fn release_memory(&mut self, cx: &Context, done: Callback, deferred: &mut Deferred) {
        let ticket = self.memory.wait(done);
        let latch = cx.latch(Notice::MemoryReleased { ticket });
        self.publish_table(cx, Some(&latch));
        deferred.latches.push(latch);
    }

    /// Sends the current DMA table to the admin queue server and all I/O threads. Each drops its
    /// clone of `latch` when it no longer uses the old table.
    pub(crate) fn publish_table(&mut self, cx: &Context, latch: Option<&Latch>) {
        let table = Arc::clone(self.memory.table());
        // A disabled controller has no admin queue, so no admin queue server would drop the latch.
        // At the start of a reset or shutdown, the queue may still exist.
        let has_admin_queue = match self.lifecycle.phase {
            Phase::Ready | Phase::Resetting => true,
            Phase::ShutDown => self.lifecycle.shutdown == Shutdown::Leaving,
            Phase::Disabled => false,
        };
        let latch_of_admin = latch.filter(|_| has_admin_queue);
        self.port.change_table(&table, latch_of_admin);
        // The queues of a quiesced controller use no memory. An I/O thread handles messages to them
        // only when the quiesce ends, so the latch must not wait for these messages.
        let latch = latch.filter(|_| self.quiesce.step != Step::Quiesced);
        cx.send_all(self.queues.workers(), |controller| Message::Table {
            controller,
            table: Arc::clone(&table),
            latches: latch.into_iter().cloned().collect(),
        });
    }
}
