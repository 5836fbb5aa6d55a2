//! The control plane written down, and read again.

use super::Control;
use super::admin::Attach;
use super::admin_progress::AdminProgress;
use super::diagnostics::Diagnostics;
use super::memory::HostMemory;
use super::pool::PoolCommands;
use super::registers::Registers;
use super::reset::{Lifecycle, Phase};
use super::rest::Step;
use crate::admin::events::AsyncEvents;
use crate::admin::logs::ErrorLog;
use crate::context::Context;
use crate::queue::admin::AdminQueue;
use crate::saved::{SavedAdminQueue, SavedControl, SavedController, SavedPart};
use crate::successor::{RestoreError, SaveError};
use crate::uncorrectable::Uncorrectable;
use crate::worker::queue_move::{Opening, Restoring};
use shadowbell_memory::EventFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Control {
    /// What has to be kept of the control plane of a controller at rest, and whether an admin
    /// command was fetched since it was enabled.
    ///
    /// # Errors
    /// It is not at rest, or can not be passed on.
    pub(crate) fn save(&self, cx: &Context) -> Result<(SavedControl, bool), SaveError> {
        if self.rest.step != Step::Resting {
            return Err(SaveError::AtWork);
        }
        if self.overriding.is_some() {
            return Err(SaveError::Overridden);
        }
        Ok((self.describe(cx), self.port.is_used()))
    }

    /// The admin queue, if nobody has begun to serve it; as with [`save`](Self::save).
    pub(crate) fn save_unserved(&self, used: bool) -> Option<SavedAdminQueue> {
        self.port.unserved().map(|queue| queue.save(used))
    }

    /// The control plane as it is.
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

    /// Goes on from the state of another control plane. The host's memory is mapped already.
    /// `eventfds` are those of each part's doorbells.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller is of no use then.
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
        self.rest.step = Step::Resting;
        self.queues.restore(cx, control.granted, parts, eventfds, &restoring)
    }

    /// Goes on from the state of a controller of another machine, at rest; this one is disabled.
    /// The state was [checked](crate::migrated::check).
    ///
    /// # Errors
    /// [`RestoreError`]; the controller has to be reset then.
    pub(crate) fn load(
        &mut self,
        cx: &Context,
        control: &SavedControl,
        admin: Option<&SavedAdminQueue>,
        parts: &mut [SavedPart],
    ) -> Result<(), RestoreError> {
        if self.lifecycle.phase != Phase::Disabled || self.rest.step != Step::Working {
            return Err(RestoreError::Invalid("the controller is in use"));
        }
        // Here there were other resets.
        let generation = self.lifecycle.generation.wrapping_add(1);
        self.take_over(cx, &SavedControl { generation, ..control.clone() })?;
        self.rest.step = Step::Resting;
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

    /// Takes over all that is no queue.
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

    /// As [`adopt`](Self::adopt), whatever the controller was before.
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

    /// Goes on with an admin queue that was served elsewhere.
    pub(super) fn reopen_admin(
        &mut self,
        cx: &Context,
        saved: &SavedAdminQueue,
        queue: AdminQueue,
    ) {
        let (table, shadow) = (Arc::clone(self.memory.table()), self.memory.shadow);
        let generation = self.lifecycle.generation;
        self.port.progress = AdminProgress::recover(saved, queue.to_post());
        self.port.reopen(Attach { queue, table, generation, shadow }, saved.used);
        self.poll_admin_doorbells(cx);
        self.tell_ana(cx);
    }
}

/// What queues need that were served elsewhere.
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
