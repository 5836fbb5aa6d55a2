//! Quiesce, restore, migration and crash recovery of a controller.

use super::{Announcement, Controller};
use crate::migration_state::MigrationState;
use crate::restore_error::{RestoreError, SaveError};
use crate::saved::{Death, Recorder, SavedController};
use shadowbell_state::Descriptors;
use std::io;
use std::sync::Arc;

impl Controller {
    /// Quiesces the controller, so that another process can continue it: admin commands in flight
    /// end and no new one starts, then no I/O command is fetched and those in flight end. Commands
    /// that the host submits meanwhile wait in its queues. `done` runs, on any thread, when the
    /// controller is quiesced. It is dropped instead if [`resume`](Self::resume) is called earlier,
    /// or the last handle of the controller is dropped.
    ///
    /// The quiesce waits for pending operations of the carrier, such as a reset or an unmap. The
    /// carrier should not start new operations: they would run after `resume`, or never.
    pub fn freeze(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, _| control.begin_quiesce(Box::new(done)));
        self.0.schedule();
    }

    /// Ends the quiesce of [`freeze`](Self::freeze), or cancels it if it is not complete. The
    /// controller continues as before.
    pub fn resume(&self) {
        let dropped = self.0.control().end_quiesce(&self.0.context);
        drop(dropped);
        self.0.schedule();
    }

    /// Snapshot of the quiesced controller for another process. The controller is not changed. Host
    /// memory and interrupts are not included: the carrier has to transfer them.
    ///
    /// # Errors
    /// [`SaveError`].
    /// [`SaveError`].
    pub fn save(&self, fds: &mut Descriptors) -> Result<SavedController, SaveError> {
        self.0.save(fds)
    }

    /// Restores a snapshot and runs the controller. It must be the last step, because commands are
    /// fetched immediately. This controller was created by [`successor`](Self::successor), and the
    /// saved one must not be [resumed](Self::resume).
    ///
    /// Each interrupt vector in use is raised once, because the saved controller may have delayed
    /// an interrupt.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller is then unusable, and has not accessed host memory.
    pub fn restore(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        self.restore_quiesced(saved, fds)?;
        self.resume();
        Ok(())
    }

    /// Restores a snapshot like [`restore`](Self::restore), but leaves the controller quiesced:
    /// no command is fetched before [`resume`](Self::resume).
    ///
    /// # Errors
    /// As for `restore`.
    pub fn restore_quiesced(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        self.0.restore(saved, fds)
    }

    /// Snapshot of the [quiesced](Self::freeze) controller for an equal controller on another
    /// machine, whose namespaces must be on the same disks. As for [`save`](Self::save), memory and
    /// interrupts are not included, and the controller is not changed.
    ///
    /// # Errors
    /// [`SaveError`].
    pub fn save_for_migration(&self) -> Result<MigrationState, SaveError> {
        self.0.save_for_migration()
    }

    /// Loads a migrated state into this controller, which must be disabled, for example by a
    /// [`reset`](Self::reset), and leaves it quiesced. The state is validated, because its sender
    /// is not trusted. [`run_migrated`](Self::run_migrated) must follow, with the returned value.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller must then be reset, and has not accessed host memory.
    pub fn load_migrated(&self, migrated: MigrationState) -> Result<Announcement, RestoreError> {
        self.0.load(migrated).map(Announcement)
    }

    /// Runs a controller after [`load_migrated`](Self::load_migrated), when all host memory has its
    /// final contents. Each interrupt vector in use is raised once, because the source may have
    /// delayed an interrupt.
    pub fn run_migrated(&self, announcement: Announcement) {
        // A new DMA table makes the queues rewrite their fields in host memory.
        self.settle_dma();
        self.resume();
        self.0.raise(&announcement.0);
    }

    /// Starts checkpointing the controller to `recorder`, for crash recovery. Called before the
    /// controller is enabled, [restored](Self::restore) or [recovered](Self::recover). State that
    /// changes with every command is not checkpointed: it is in a memory file (the journal), which
    /// is one of the checkpoint's descriptors.
    ///
    /// # Errors
    /// The memory file could not be created.
    pub fn record_with(&self, recorder: Arc<dyn Recorder>) -> io::Result<()> {
        self.0.record_with(recorder)
    }

    /// Recovers the controller of a dead process from its [checkpoint](Self::record_with). All
    /// threads of the process must have ended, and none of its requests may still reach a disk or
    /// host memory. This controller was created by [`successor`](Self::successor) and is
    /// checkpointed itself. It is quiesced until [`resume`](Self::resume); the new checkpoint is
    /// then complete, and the old one no longer needed. Afterwards the host has to be
    /// [interrupted](Self::announce_recovery).
    ///
    /// Commands in flight at the time of death are executed again; their number is returned. A
    /// command with which three processes in a row have crashed is completed with Internal Error
    /// instead, and logged: `death` is the cause of the last death.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller is then unusable, and has not accessed host memory.
    pub fn recover(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
        death: Death,
    ) -> Result<usize, RestoreError> {
        self.0.recover(saved, fds, death)
    }

    /// Raises each interrupt vector of a [recovered](Self::recover) controller once, because the
    /// interrupts that the dead process raised are unknown. Called after [`resume`](Self::resume),
    /// when all controllers are served, because it takes some microseconds per vector.
    pub fn announce_recovery(&self, saved: &SavedController) {
        self.0.announce(saved);
    }
}
