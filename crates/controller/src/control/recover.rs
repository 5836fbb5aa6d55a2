//! Crash recovery of a control plane.

use super::Control;
use super::deferred::Deferred;
use super::quiesce_state::Step;
use super::reset::Phase;
use super::save::restoring;
use crate::context::Context;
use crate::journal::RecoveredJournal;
use crate::queue::admin::AdminQueue;
use crate::restore_error::RestoreError;
use crate::saved::{Recorded, SavedAdminQueue};
use shadowbell_memory::EventFd;
use shadowbell_spec::regs::SHST_OCCURRING;
use shadowbell_state::Descriptors;
use std::io;

impl Control {
    /// State for a checkpoint. A queue that is being created is not included, and one that is
    /// being deleted is: their commands are in flight and will be replayed.
    pub(crate) fn record(&self, cx: &Context, fds: &mut Descriptors) -> io::Result<Recorded> {
        let is_enabled = self.lifecycle.phase == Phase::Ready;
        let registers = &self.registers;
        let place = (registers.aqa, registers.asq, registers.acq);
        let admin = is_enabled.then(|| self.port.checkpoint.save(place, self.port.is_used()));
        let parts = if is_enabled { self.queues.record(fds)? } else { Vec::new() };
        Ok(Recorded { control: self.describe(cx), admin, parts })
    }

    /// Recovers the control plane from a checkpoint; `journal` has the newer queue positions. Host
    /// memory is already mapped. The controller is quiesced, and serves no queue until the quiesce
    /// ends. Returns the number of I/O commands to replay.
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
            // Commands in flight of the interrupted reset have ended with the dead process.
            (self.lifecycle.phase, self.lifecycle.full_reset) = (Phase::Resetting, full);
            self.memory.shadow = None;
            self.end_reset(cx, deferred);
            cx.route.begin_quiesced(Vec::new());
            return Ok(0);
        }
        if !control.enabled {
            cx.route.begin_quiesced(Vec::new());
            if self.registers.cc.en() && !self.registers.csts.cfs() {
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
            self.exclusive.want();
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
        // Written to this process's journal before the queue is served.
        let journal = cx.shared.journal_part(0, self.lifecycle.generation).unwrap_or_default();
        if let Some(journal) = &journal {
            queue.write_down(journal);
        }
        self.reopen_admin(cx, saved, queue);
        Ok(())
    }
}
