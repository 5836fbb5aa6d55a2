//! Saving and restoring the control plane.

use super::Control;
use super::admin::Attach;
use super::admin_checkpoint::AdminCheckpoint;
use super::diagnostics::Diagnostics;
use super::memory::HostMemory;
use super::pool::PoolCommands;
use super::quiesce_state::Step;
use super::registers::Registers;
use super::reset::{Lifecycle, Phase};
use crate::admin::events::AsyncEvents;
use crate::admin::logs::ErrorLog;
use crate::context::Context;
use crate::queue::admin::AdminQueue;
use crate::restore_error::{RestoreError, SaveError};
use crate::saved::{SavedAdminQueue, SavedControl, SavedController, SavedPart};
use crate::uncorrectable::Uncorrectable;
use crate::worker::queue_move::{Opening, Restoring};
use shadowbell_memory::EventFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Control {
    /// Snapshot of a quiesced controller's control plane, and true if an admin command was fetched
    /// since the controller was enabled.
    ///
    /// # Errors
    /// [`SaveError`] if the controller is not quiesced or cannot be transferred.
    pub(crate) fn save(&self, cx: &Context) -> Result<(SavedControl, bool), SaveError> {
        if self.quiesce.step != Step::Quiesced {
            return Err(SaveError::AtWork);
        }
        if self.overriding.is_some() {
            return Err(SaveError::Overridden);
        }
        Ok((self.describe(cx), self.port.is_used()))
    }

    /// Snapshot of an admin queue that the admin queue server has not attached yet. `used` is as
    /// returned by [`save`](Self::save).
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

    /// Restores a snapshot of a quiesced controller. Host memory is already mapped. `eventfds` are
    /// the doorbell eventfds of each part.
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

    /// Loads the state of a controller from another machine; the controller must be disabled, and
    /// is quiesced afterwards. The state was [checked](crate::migration_state::check).
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
        // This controller counts its own resets, so the saved generation is replaced.
        let generation = self.lifecycle.generation.wrapping_add(1);
        self.take_over(cx, &SavedControl { generation, ..control.clone() })?;
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

    /// Restores everything except the queues. The controller must be new.
    pub(super) fn adopt(
        &mut self,
        cx: &Context,
        control: &SavedControl,
    ) -> Result<(), RestoreError> {
        if self.lifecycle.generation != 0 || self.lifecycle.phase != Phase::Disabled {
            return Err(RestoreError::Invalid("the controller is in use already"));
        }
        self.take_over(cx, control)
    }

    /// Restores everything except the queues, whatever state the controller had.
    fn take_over(&mut self, cx: &Context, control: &SavedControl) -> Result<(), RestoreError> {
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
        self.lifecycle.phase = if control.enabled { Phase::Ready } else { Phase::Disabled };
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

    /// Hands an admin queue of another process to the admin queue server.
    pub(super) fn reopen_admin(
        &mut self,
        cx: &Context,
        saved: &SavedAdminQueue,
        queue: AdminQueue,
    ) {
        let (table, shadow) = (Arc::clone(self.memory.table()), self.memory.shadow);
        let generation = self.lifecycle.generation;
        self.port.checkpoint = AdminCheckpoint::recover(saved, queue.to_post());
        self.port.reopen(Attach { queue, table, generation, shadow }, saved.used);
        self.poll_admin_doorbells(cx);
        self.tell_ana(cx);
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
