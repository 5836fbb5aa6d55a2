//! Coming to rest, and going on: in another process, on another machine, after a death.

use super::{Announcement, Controller};
use crate::migrated::MigratedController;
use crate::recorder::Recorder;
use crate::saved::{Death, SavedController};
use crate::successor::{RestoreError, SaveError};
use shadowbell_state::Descriptors;
use std::io;
use std::sync::Arc;

impl Controller {
    /// Has the controller come to rest, so that another process can go on with it: admin commands
    /// that are under way end, no new one is begun; then no I/O command is fetched any more, and
    /// those in flight end. What the host submits meanwhile waits in its queues. `done` runs, on
    /// any thread, when that is so; it is dropped instead if [`resume`](Self::resume) is called
    /// before, or the last handle of the controller dropped.
    ///
    /// Whoever carries the controller must not have anything under way that it waits for (a reset,
    /// an unmap), or `done` waits for that as well; and should not bring anything new: it would be
    /// carried out after `resume`, or never.
    pub fn freeze(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, _| control.begin_rest(Box::new(done)));
        self.0.schedule();
    }

    /// Goes on after [`freeze`](Self::freeze), as if nothing had been; also before that has come to
    /// its end.
    pub fn resume(&self) {
        let dropped = self.0.control().end_rest(&self.0.context);
        drop(dropped);
        self.0.schedule();
    }

    /// What another process needs to go on with this controller, which is at rest. Nothing of it
    /// is changed. The host's memory and its interrupts are not part of it: they are whoever's who
    /// carries the controller.
    ///
    /// # Errors
    /// [`SaveError`].
    pub fn save(&self, fds: &mut Descriptors) -> Result<SavedController, SaveError> {
        self.0.save(fds)
    }

    /// Goes on from there: as the last step, for it fetches commands at once. This controller was
    /// made by [`successor`](Self::successor), and the other one is never
    /// [resumed](Self::resume).
    ///
    /// Each interrupt vector in use is raised once, because the other one may have held one back.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller is of no use then, and has touched nothing.
    pub fn restore(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        self.restore_at_rest(saved, fds)?;
        self.resume();
        Ok(())
    }

    /// As [`restore`](Self::restore), but at rest: nothing is fetched before
    /// [`resume`](Self::resume).
    ///
    /// # Errors
    /// As of `restore`.
    pub fn restore_at_rest(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        self.0.restore(saved, fds)
    }

    /// What a controller like this one needs on another machine to go on with this one, which is
    /// [at rest](Self::freeze): its namespaces have to be the same disks there. As with
    /// [`save`](Self::save), memory and interrupts are not part of it, and nothing is changed.
    ///
    /// # Errors
    /// [`SaveError`].
    pub fn save_for_migration(&self) -> Result<MigratedController, SaveError> {
        self.0.save_for_migration()
    }

    /// Goes on from there, at rest: this controller is disabled, after a [`reset`](Self::reset) at
    /// the latest. Whoever has sent the state may be anybody. [`run_migrated`](Self::run_migrated)
    /// has to follow, with what this returns.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller has to be reset then, and has touched nothing.
    pub fn load_migrated(
        &self,
        migrated: MigratedController,
    ) -> Result<Announcement, RestoreError> {
        self.0.load(migrated).map(Announcement)
    }

    /// Has a controller that was [loaded](Self::load_migrated) run: all of the host's memory is
    /// there as the other one has left it. Each interrupt vector in use is raised once, because the
    /// other one may have held one back.
    pub fn run_migrated(&self, announcement: Announcement) {
        // What the queues have in the host's memory is written anew.
        self.settle_dma();
        self.resume();
        self.0.raise(&announcement.0);
    }

    /// Has `recorder` keep what the controller is, from now on, in case that this process dies. To
    /// be called before the controller is enabled, [restored](Self::restore) or
    /// [recovered](Self::recover). What changes with every command is not recorded but lies in a
    /// memory file, which is one of the descriptors of the record.
    ///
    /// # Errors
    /// There is no memory for that file.
    pub fn record_with(&self, recorder: Arc<dyn Recorder>) -> io::Result<()> {
        self.0.record_with(recorder)
    }

    /// Goes on from the [record](Self::record_with) of a controller whose process has died, with
    /// all of its threads, and of whose requests none can reach the disk or the host's memory any
    /// more. This controller was made by [`successor`](Self::successor) and is recorded itself.
    /// It is at rest until [`resume`](Self::resume): the new record is complete, and the old one
    /// not needed any more. Then its host is to be [interrupted](Self::announce_recovery).
    ///
    /// Commands that were under way are carried out again. How many that are. One with which three
    /// processes have died by a fault, one after the other, is completed with an Internal Error
    /// instead, and the log says so: `death` is how the last one has died.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller is of no use then, and has touched nothing.
    pub fn recover(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
        death: Death,
    ) -> Result<usize, RestoreError> {
        self.0.recover(saved, fds, death)
    }

    /// Raises each interrupt vector once of a controller that [goes on](Self::recover): what the
    /// process before has announced is not known. To be called after [`resume`](Self::resume),
    /// when everything is served: it takes some microseconds for each vector.
    pub fn announce_recovery(&self, saved: &SavedController) {
        self.0.announce(saved);
    }
}
