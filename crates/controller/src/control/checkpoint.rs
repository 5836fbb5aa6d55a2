//! Checkpoint of a control plane: save, restore, crash recovery, quiesce, move to another I/O
//! thread, and dirty page logging for migration.

use super::Control;
use super::admin_port::{AdminCheckpoint, Attach};
use super::diagnostics::Diagnostics;
use super::lifecycle_state::{Callback, Deferred, Lifecycle, Phase, Step};
use super::memory::HostMemory;
use super::pool::PoolCommands;
use super::registers::Registers;
use crate::admin::events::AsyncEvents;
use crate::admin::logs::ErrorLog;
use crate::context::Context;
use crate::event::Event;
use crate::journal::RecoveredJournal;
use crate::notice::Notice;
use crate::queue::admin::AdminQueue;
use crate::restore_error::{RestoreError, SaveError};
use crate::route::RelocateError;
use crate::saved::{Recorded, SavedAdminQueue, SavedControl, SavedController, SavedPart};
use crate::uncorrectable::Uncorrectable;
use crate::worker::mailbox::Message;
use crate::worker::queue_move::{Departure, Opening, Restoring};
use shadowbell_memory::{DirtyLog, EventFd};
use shadowbell_spec::regs::{SHST_NORMAL, SHST_OCCURRING};
use shadowbell_state::Descriptors;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of checks for orphans (cancelled writes that the storage may still execute), while a
/// quiesce waits for their end.
const ORPHANS: Duration = Duration::from_millis(5);

/// Save and restore of a quiesced controller.
impl Control {
    /// Snapshot of a quiesced controller's control plane, and true if an admin command was fetched
    /// since the controller was enabled.
    ///
    /// # Errors
    /// [`SaveError`] if the controller is not quiesced or cannot be transferred.
    pub(crate) fn save(&self, cx: &Context) -> Result<(SavedControl, bool), SaveError> {
        if self.quiesce.step != Step::Quiesced || !self.lifecycle.is_idle() {
            return Err(SaveError::AtWork);
        }
        if self.overriding.is_some() {
            return Err(SaveError::Overridden);
        }
        Ok((self.describe(cx), self.port.is_used()))
    }

    /// Snapshot of an admin queue that waits for the admin queue server to attach it. `used` is the
    /// value that [`save`](Self::save) has returned.
    pub(crate) fn save_unserved(&self, used: bool) -> Option<SavedAdminQueue> {
        self.port.unserved().map(|queue| queue.save(used))
    }

    /// Snapshot of the control plane, quiesced or running.
    pub(super) fn describe(&self, cx: &Context) -> SavedControl {
        let Lifecycle { phase, generation, power_cycles, unsafe_shutdowns, .. } = self.lifecycle;
        let Lifecycle { since, reset_at, .. } = self.lifecycle;
        let (features, changed) = self.commands.save();
        let (uncorrectable, uncorrectable_changes) = cx.shared.uncorrectable().save();
        SavedControl {
            sharing: self.save_sharing(cx),
            uncorrectable,
            uncorrectable_changes,
            creating: self.commands.pool.save(),
            registers: self.registers.save(),
            enabled: phase == Phase::Ready,
            generation,
            power_cycles,
            unsafe_shutdowns,
            powered_ms: u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX),
            reset_ms: u64::try_from(reset_at.elapsed().as_millis()).unwrap_or(u64::MAX),
            diagnostics: self.commands.diagnostics.save(),
            shadow: self.memory.shadow,
            features,
            changed,
            events: self.port.events.save(),
            errors: self.port.errors.save(),
            granted: self.queues.granted(),
            resetting: (phase == Phase::Resetting).then_some(self.lifecycle.full_reset),
        }
    }

    /// Restores a snapshot of a quiesced controller. Host memory must be mapped already. `eventfds`
    /// are the doorbell eventfds of each I/O thread in the snapshot.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller is then unusable.
    pub(crate) fn restore(
        &mut self,
        cx: &Context,
        saved: &SavedController,
        eventfds: Vec<Vec<EventFd>>,
    ) -> Result<(), RestoreError> {
        let SavedController { control, admin, parts, .. } = saved;
        self.adopt(cx, control)?;
        if control.enabled {
            let admin = admin.as_ref().ok_or(RestoreError::Invalid("there is no admin queue"))?;
            self.restore_admin(cx, admin)?;
        }
        if saved.isolated && !cx.route.is_diverted() {
            self.isolate(cx)?;
        }
        let restoring = restoring(cx, &self.registers, &self.memory, control.generation);
        self.quiesce.step = Step::Quiesced;
        self.queues.restore(cx, control.granted, parts, eventfds, &restoring)
    }

    /// Loads the state of a controller from another machine. The controller must be disabled, and
    /// is quiesced afterwards. The caller has [checked](crate::migration_state::check) the state.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller must then be reset.
    pub(crate) fn load(
        &mut self,
        cx: &Context,
        control: &SavedControl,
        admin: Option<&SavedAdminQueue>,
        parts: &mut [SavedPart],
    ) -> Result<(), RestoreError> {
        if self.lifecycle.phase != Phase::Disabled || self.quiesce.step != Step::Running {
            return Err(RestoreError::Invalid("the controller is in use"));
        }
        // The generation counts the resets of this controller, so the value from the other machine
        // is not used.
        let generation = self.lifecycle.generation.wrapping_add(1);
        self.restore_state(cx, &SavedControl { generation, ..control.clone() })?;
        self.quiesce.step = Step::Quiesced;
        if let Some(admin) = admin {
            self.registers.check_enable().map_err(RestoreError::Invalid)?;
            self.restore_admin(cx, admin)?;
        }
        for part in &mut *parts {
            part.worker = cx.pool.least_loaded();
        }
        let restoring = restoring(cx, &self.registers, &self.memory, generation);
        let eventfds = parts.iter().map(|_| Vec::new()).collect();
        self.queues.restore(cx, control.granted, parts, eventfds, &restoring)
    }

    /// Restores everything except the queues, into a new controller.
    pub(super) fn adopt(
        &mut self,
        cx: &Context,
        control: &SavedControl,
    ) -> Result<(), RestoreError> {
        if self.lifecycle.generation != 0 || self.lifecycle.phase != Phase::Disabled {
            return Err(RestoreError::Invalid("the controller is in use already"));
        }
        self.restore_state(cx, control)
    }

    /// Restores everything except the queues, into a controller in any state.
    fn restore_state(&mut self, cx: &Context, control: &SavedControl) -> Result<(), RestoreError> {
        self.restore_sharing(cx, &control.sharing);
        let errors = ErrorLog::restore(&control.errors);
        self.port.errors = errors.ok_or(RestoreError::Invalid("the error log"))?;
        self.port.events = AsyncEvents::restore(&control.events);
        self.registers.restore(&control.registers);
        cx.select_command_sets(self.registers.cc.css());
        self.commands.restore(&control.features, &control.changed);
        self.commands.diagnostics = Diagnostics::restore(&control.diagnostics);
        self.commands.pool = PoolCommands::restore(control.creating);
        self.memory.shadow = control.shadow;
        cx.shared.set_shadowed(control.shadow.is_some());
        let csts = self.registers.csts;
        self.lifecycle.phase = match (control.enabled, csts.rdy() && csts.shst() != SHST_NORMAL) {
            (true, _) => Phase::Ready,
            (false, true) => Phase::ShutDown,
            (false, false) => Phase::Disabled,
        };
        self.lifecycle.generation = control.generation;
        self.lifecycle.power_cycles = control.power_cycles;
        self.lifecycle.unsafe_shutdowns = control.unsafe_shutdowns;
        let powered = Duration::from_millis(control.powered_ms);
        self.lifecycle.since = Instant::now().checked_sub(powered).unwrap_or(self.lifecycle.since);
        let ago = Duration::from_millis(control.reset_ms);
        self.lifecycle.reset_at =
            Instant::now().checked_sub(ago).unwrap_or(self.lifecycle.reset_at);
        if let Some(coalescing) = control.features.coalescing() {
            cx.shared.coalescing.set(coalescing.thr(), coalescing.time());
        }
        for vector in &control.features.coalescing_disabled {
            cx.shared.coalescing.disable(*vector, true);
        }
        let SavedControl { uncorrectable, uncorrectable_changes, .. } = control;
        let marks = Uncorrectable::restore(uncorrectable, *uncorrectable_changes);
        cx.shared.change_uncorrectable(|all| *all = marks);
        cx.shared.set_write_through(!control.features.write_cache);
        cx.shared.set_copy_formats(control.features.copy_formats);
        Ok(())
    }

    fn restore_admin(&mut self, cx: &Context, saved: &SavedAdminQueue) -> Result<(), RestoreError> {
        let (table, shadow) = (self.memory.table(), self.memory.shadow);
        let queue = AdminQueue::restore(saved, &cx.shared, table, shadow)
            .ok_or(RestoreError::Invalid("the admin queue"))?;
        self.reopen_admin(cx, saved, queue);
        Ok(())
    }

    /// Passes an admin queue of another process to the admin queue server.
    fn reopen_admin(&mut self, cx: &Context, saved: &SavedAdminQueue, queue: AdminQueue) {
        let (table, shadow) = (Arc::clone(self.memory.table()), self.memory.shadow);
        let generation = self.lifecycle.generation;
        self.port.checkpoint = AdminCheckpoint::recover(saved, queue.to_post());
        self.port.reopen(Attach { queue, table, generation, shadow }, saved.used);
        self.poll_admin_doorbells(cx);
        self.report_ana_changes(cx);
    }
}

/// Environment for restoring or recovering queues.
pub(super) fn restoring<'a>(
    cx: &'a Context,
    registers: &Registers,
    memory: &'a HostMemory,
    generation: u64,
) -> Restoring<'a> {
    let opening = Opening {
        namespaces: cx.visible(),
        page_size: registers.page_size(),
        max_transfer: 4096usize << cx.config.mdts,
        quota: cx.config.quota,
        generation,
    };
    Restoring {
        shared: &cx.shared,
        control: &cx.control,
        opening,
        table: memory.table(),
        shadow: memory.shadow,
        limit: cx.pool.hold_limit(),
    }
}

/// Crash recovery.
impl Control {
    /// State for a checkpoint. A queue whose creation is in progress is not included; a queue whose
    /// deletion is in progress is included. The command that creates or deletes it is in flight and
    /// will be replayed.
    pub(crate) fn record(&self, cx: &Context, fds: &mut Descriptors) -> io::Result<Recorded> {
        let is_enabled = self.lifecycle.phase == Phase::Ready;
        let registers = &self.registers;
        let place = (registers.aqa, registers.asq, registers.acq);
        let admin = is_enabled.then(|| self.port.checkpoint.save(place, self.port.is_used()));
        let parts = if is_enabled { self.queues.record(fds)? } else { Vec::new() };
        Ok(Recorded { control: self.describe(cx), admin, parts })
    }

    /// Recovers the control plane from a checkpoint. Newer queue positions come from `journal`.
    /// Host memory must be mapped already. The controller is quiesced afterwards, and no queue is
    /// served until the quiesce ends. Returns the number of I/O commands to replay.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller is then unusable.
    pub(crate) fn recover(
        &mut self,
        cx: &Context,
        recorded: &Recorded,
        eventfds: Vec<Vec<EventFd>>,
        journal: &mut RecoveredJournal,
        deferred: &mut Deferred,
    ) -> Result<usize, RestoreError> {
        let Recorded { control, admin, parts } = recorded;
        self.adopt(cx, control)?;
        self.quiesce.step = Step::Quiesced;
        if let Some(full) = control.resetting {
            // The dead process was resetting the controller. The commands for which the reset
            // waited have ended with the process.
            (self.lifecycle.phase, self.lifecycle.full_reset) = (Phase::Resetting, full);
            self.memory.shadow = None;
            cx.shared.set_shadowed(false);
            if self.registers.csts.shst() == SHST_OCCURRING {
                self.shut_down(cx, deferred);
            }
            cx.route.begin_quiesced(Vec::new());
            self.end_reset(cx, deferred);
            return Ok(0);
        }
        if !control.enabled {
            cx.route.begin_quiesced(Vec::new());
            let csts = self.registers.csts;
            if csts.shst() == SHST_OCCURRING {
                self.shut_down(cx, deferred);
            } else if self.registers.cc.en() && !csts.cfs() && csts.shst() == SHST_NORMAL {
                self.enable(cx, deferred);
            }
            return Ok(0);
        }
        let admin = admin.as_ref().ok_or(RestoreError::Invalid("there is no admin queue"))?;
        self.recover_admin(cx, admin, journal)?;
        self.log_recovered(cx);
        let restoring = restoring(cx, &self.registers, &self.memory, control.generation);
        let replays =
            self.queues.recover(cx, control.granted, parts, eventfds, &restoring, journal)?;
        if cx.shared.is_exclusive() {
            self.exclusive.request();
        }
        if self.registers.csts.shst() == SHST_OCCURRING {
            self.shut_down(cx, deferred);
        }
        Ok(replays)
    }

    fn recover_admin(
        &mut self,
        cx: &Context,
        saved: &SavedAdminQueue,
        journal: &RecoveredJournal,
    ) -> Result<(), RestoreError> {
        let (table, shadow) = (self.memory.table(), self.memory.shadow);
        let queue = AdminQueue::recover(saved, &cx.shared, table, shadow, journal)
            .ok_or(RestoreError::Invalid("the admin queue"))?;
        // Queue positions must be in this process's journal before the queue is served.
        let journal = cx.shared.journal_part(0, self.lifecycle.generation).unwrap_or_default();
        if let Some(journal) = &journal {
            queue.write_down(journal);
        }
        self.reopen_admin(cx, saved, queue);
        Ok(())
    }
}

/// Quiesce: start, progress, completion and end.
impl Control {
    /// Starts to quiesce the controller. When the controller is quiesced, `done` is called. If the
    /// quiesce is cancelled, `done` is dropped without a call.
    pub(crate) fn begin_quiesce(&mut self, done: Callback) -> Deferred {
        let mut deferred = Deferred::default();
        if self.quiesce.step == Step::Quiesced {
            deferred.callbacks.push(done);
        } else {
            self.quiesce.waiting.push(done);
        }
        if self.quiesce.step == Step::Running {
            self.quiesce.step = Step::Requested;
        }
        deferred
    }

    /// Continues a quiesce in progress. `admin_is_idle` is true if no admin command is in flight.
    pub(crate) fn advance_quiesce(
        &mut self,
        cx: &Context,
        admin_is_idle: bool,
        deferred: &mut Deferred,
    ) {
        self.quiesce.retry_at = None;
        if self.quiesce.step != Step::Requested || !admin_is_idle || !self.is_idle(cx) {
            return;
        }
        if cx.serving().iter().any(|namespace| namespace.disk().orphans() != 0) {
            self.quiesce.retry_at = Instant::now().checked_add(ORPHANS);
            return;
        }
        self.quiesce.step = Step::Leaving;
        let (controller, latch) = (cx.shared.id, cx.latch(Notice::QueuesDetached));
        cx.route.begin_quiesce(&cx.pool, self.queues.workers(), |to| {
            let departure = Departure { to, latch: latch.clone() };
            Message::MoveAway { controller, departure }
        });
        deferred.latches.push(latch);
    }

    /// True if no operation is in progress for which a quiesce has to wait.
    pub(super) fn is_idle(&self, cx: &Context) -> bool {
        self.lifecycle.is_idle()
            && !self.memory.is_awaited()
            && self.commands.is_idle()
            && cx.lba_status.is_idle()
            && self.queues.is_idle()
            && self.namespace_changes.is_idle()
            && self.exclusive.is_idle()
            && !self.port.has_orders()
            && !cx.route.is_leaving()
    }

    /// Completes the quiesce after the queues have left their I/O threads, or returns the queues
    /// if the quiesce was cancelled.
    pub(super) fn queues_detached(&mut self, cx: &Context, deferred: &mut Deferred) {
        match self.quiesce.step {
            Step::Leaving => {
                self.quiesce.step = Step::Quiesced;
                deferred.callbacks.append(&mut self.quiesce.waiting);
            }
            Step::Returning => {
                cx.route.end_quiesce(&cx.pool);
                let is_requested = !self.quiesce.waiting.is_empty();
                self.quiesce.step = if is_requested { Step::Requested } else { Step::Running };
            }
            Step::Running | Step::Requested | Step::Quiesced => {}
        }
    }

    /// Ends or cancels the quiesce. Returns the callbacks that waited for the quiesce; the caller
    /// must release the lock before it drops them.
    pub(crate) fn end_quiesce(&mut self, cx: &Context) -> Vec<Callback> {
        let controller = cx.shared.id;
        self.quiesce.step = match self.quiesce.step {
            Step::Running | Step::Requested => Step::Running,
            Step::Leaving | Step::Returning => {
                cx.route.cancel_quiesce(&cx.pool, || Message::CancelMove { controller });
                Step::Returning
            }
            Step::Quiesced => {
                cx.route.end_quiesce(&cx.pool);
                Step::Running
            }
        };
        std::mem::take(&mut self.quiesce.waiting)
    }
}

/// Move of the controller to another I/O thread.
impl Control {
    /// Moves a controller whose passes take too long to a dedicated I/O thread.
    pub(super) fn too_slow(&mut self, cx: &Context, took: Duration, deferred: &mut Deferred) {
        match self.isolate(cx) {
            Ok(()) => {
                self.log_isolated(cx, took);
                deferred.event(Event::Isolated(took));
            }
            // The controller already has a dedicated I/O thread, or is about to move to another
            // process.
            Err(RelocateError::Placed | RelocateError::Frozen) => {}
            Err(error) => tracing::warn!(
                serial = cx.config.serial,
                %error,
                "the controller delays others for {took:?} at a time, and cannot be moved"
            ),
        }
    }

    /// Moves the controller to a dedicated I/O thread.
    pub(crate) fn isolate(&mut self, cx: &Context) -> Result<(), RelocateError> {
        self.check_relocation(cx)?;
        let worker = cx.pool.claim()?.ok_or(RelocateError::TooMany)?;
        self.relocate(cx, worker)
    }

    /// Moves the controller to I/O thread `worker`.
    pub(crate) fn pin_to(&mut self, cx: &Context, worker: usize) -> Result<(), RelocateError> {
        if worker >= cx.pool.len() {
            return Err(RelocateError::NoSuchWorker(worker, cx.pool.len()));
        }
        self.check_relocation(cx)?;
        self.relocate(cx, worker)
    }

    fn check_relocation(&self, cx: &Context) -> Result<(), RelocateError> {
        if self.quiesce.step != Step::Running {
            Err(RelocateError::Frozen)
        } else if cx.route.is_diverted() {
            Err(RelocateError::Placed)
        } else {
            Ok(())
        }
    }

    pub(super) fn relocate(&mut self, cx: &Context, worker: usize) -> Result<(), RelocateError> {
        let Some(to) = cx.pool.destination(worker) else {
            return Err(RelocateError::NoSuchWorker(worker, cx.pool.len()));
        };
        cx.route.divert(&cx.pool, worker, self.queues.workers(), |from| {
            let latch = cx.latch(Notice::Relocated { from });
            let departure = Departure { to: to.clone(), latch };
            Message::MoveAway { controller: cx.shared.id, departure }
        });
        Ok(())
    }
}

/// Size of a completion queue entry in bytes.
const ENTRY: u64 = 16;

/// Dirty page logging of the controller's writes to host memory, for migration.
impl Control {
    /// Enables or disables dirty page logging. `done` is called when no write in flight uses the
    /// previous setting. Returns `None` if the setting is unchanged.
    pub(crate) fn set_logged(
        &mut self,
        cx: &Context,
        logged: bool,
        done: Callback,
    ) -> Option<Deferred> {
        self.memory.set_logged(logged).then(|| self.renew_views(cx, done))
    }

    /// Makes all threads and commands use new views (`shadowbell_memory::View`) of host memory.
    /// `done` is called when no command uses an old view. All earlier writes are then in the dirty
    /// page log.
    pub(crate) fn renew_views(&mut self, cx: &Context, done: Callback) -> Deferred {
        self.log_queues();
        let mut deferred = Deferred::default();
        self.release_memory(cx, done, &mut deferred);
        deferred
    }

    /// Dirty page log, if enabled.
    pub(crate) fn dirty_log(&self) -> Option<Arc<DirtyLog>> {
        self.memory.log().cloned()
    }

    /// Marks all completion queues and the EventIdx page as dirty, because writes to them do not
    /// use a view with a log. Must be called before a completion queue or the EventIdx page is
    /// removed.
    pub(super) fn log_queues(&self) {
        let Some(log) = self.memory.log() else { return };
        for (iova, entries) in self.queues.completion_queues() {
            log.add(iova, u64::from(entries) * ENTRY);
        }
        if self.port.is_open() {
            let entries = u64::from(self.registers.aqa.acqs()) + 1;
            log.add(self.registers.acq, entries * ENTRY);
        }
        if let Some((_, event_idx)) = self.memory.shadow {
            log.add(event_idx, self.registers.page_size() as u64);
        }
    }
}
