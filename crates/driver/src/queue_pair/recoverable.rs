//! Reaction of a queue pair to a change of the state epoch, a word that every state change of the
//! controller and every timeout tick changes. See [`recovery`](crate::recovery).

use crate::admin::AdminCommands;
use crate::attached_controller::AttachedController;
use crate::command::Completion;
use crate::controller_state::Condition;
use crate::dma::Buffer;
use crate::error::QueueError;
use crate::io_queues::{IoQueueTable, doorbells};
use crate::queue::{Core, QueueLayout, RetryTable};
use crate::recovery::{count, reset};
use shadowbell_memory::EventFd;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::Abort;

/// Value of `handled_epoch` that the controller's epoch word never has.
const EPOCH_UNHANDLED: u32 = u32::MAX;
/// Number of controller resets that are tried for a queue that cannot be created again.
const TRIES: u32 = 6;
/// Maximum number of Abort commands in flight. The controller's limit (ACL) also applies.
const ABORTS: usize = 4;

/// The queues of a pair, with the parameters to create them again.
pub(super) struct RecoverableQueue {
    pub(super) core: Core,
    retries: RetryTable,
    pub(super) layout: QueueLayout,
    /// Eventfd that the queue's interrupt signals.
    pub(super) event: EventFd,
    /// Value of the controller's epoch word when its state was last handled. If the word differs,
    /// the state must be handled again.
    pub(super) handled_epoch: u32,
    /// Value of the controller's epoch word when the last timeout tick was counted.
    ticked_epoch: u32,
    /// Number of completed controller resets at the time when the queues were created.
    generation: u32,
    /// Buffers of ended commands that the controller may still write to.
    retired_buffers: Vec<Buffer>,
}

impl RecoverableQueue {
    pub(super) fn new(
        core: Core,
        layout: QueueLayout,
        event: EventFd,
        generation: u32,
        controller: &AttachedController,
    ) -> Self {
        let epoch = controller.state().epoch();
        Self {
            core,
            retries: RetryTable::new(controller.recovery.repeats),
            layout,
            event,
            handled_epoch: epoch,
            ticked_epoch: epoch,
            generation,
            retired_buffers: Vec::new(),
        }
    }

    /// Takes the next completion, also of a late command, but not of a command that the driver has
    /// ended.
    pub(super) fn pop(&mut self) -> Option<Completion> {
        self.retries.pop(&mut self.core)
    }

    #[inline]
    pub(super) fn has_ended(&self) -> bool {
        self.retries.has_ended()
    }

    /// Handles the state of the controller. After success, the queue is usable.
    ///
    /// # Errors
    /// [`QueueError`], if the queue has failed for good or the controller was detached.
    #[cold]
    pub(super) fn handle_state_change(
        &mut self,
        controller: &AttachedController,
    ) -> Result<(), QueueError> {
        let state = controller.state();
        let mut tries = 0;
        let mut why = String::new();
        while tries < TRIES {
            let epoch = state.epoch();
            match state.condition() {
                Condition::Live => {}
                Condition::Resetting => {
                    // The thread that resets the controller holds the lock until the reset has
                    // ended.
                    drop(controller.enabled.io_queues());
                    continue;
                }
                Condition::Detached => return Err(QueueError::Detached { qid: self.core.qid() }),
                Condition::Failed { quiet } => {
                    return self.end(controller, &state.failure_reason(), quiet);
                }
            }
            let generation = state.generation();
            let outcome = if generation != self.generation {
                self.restore(controller, generation)
            } else if epoch != self.ticked_epoch {
                self.ticked_epoch = epoch;
                self.tick(controller)
            } else {
                Ok(true)
            };
            match outcome {
                Ok(true) => {
                    // While completions of ended commands are pending, `pop` must call this
                    // function again. So the epoch is not recorded as handled.
                    self.handled_epoch = if self.has_ended() { EPOCH_UNHANDLED } else { epoch };
                    return Ok(());
                }
                Ok(false) => {}
                Err(error) => {
                    tries += 1;
                    reset(controller, generation, &error);
                    why = error;
                }
            }
        }
        // `quiet` is false: the controller works, and may have created queues although it did not
        // confirm that.
        self.end(controller, &why, false)
    }

    /// Handles a change of the controller's state, and takes a completion. Completions of commands
    /// that the driver has ended come first. Called when the completion queue has no entry.
    #[cold]
    pub(super) fn pop_aborted(&mut self, controller: &AttachedController) -> Option<Completion> {
        // An error is ignored here: the next call that rings the doorbell reports it.
        let _ = self.handle_state_change(controller);
        self.retries.take_ended(&mut self.core).or_else(|| self.pop())
    }

    /// Takes all buffers of the queue: those of outstanding commands, and those of ended commands
    /// that the controller may still write to.
    pub(super) fn take_buffers(&mut self) -> Vec<Buffer> {
        let mut buffers = self.core.take_buffers();
        buffers.append(&mut self.retired_buffers);
        buffers
    }

    /// Fails the queue, and ends every outstanding command.
    fn end(
        &mut self,
        controller: &AttachedController,
        why: &str,
        quiet: bool,
    ) -> Result<(), QueueError> {
        let before = self.core.stats().ended;
        let retired_buffers = self.retries.end_all(&mut self.core, why, quiet);
        self.retired_buffers.extend(retired_buffers);
        let ended = self.core.stats().ended - before;
        if ended != 0 {
            count(&controller.counters.ended, ended);
        }
        Err(self.core.failure())
    }

    /// Counts a timeout tick, and sends Abort for late commands. Returns `true` if the queue is
    /// usable, `false` if the state must be checked again.
    ///
    /// # Errors
    /// The reason for a controller reset.
    fn tick(&mut self, controller: &AttachedController) -> Result<bool, String> {
        if !controller.recovery.enabled || self.core.outstanding() == 0 {
            return Ok(true);
        }
        let ticks = controller.ticks;
        let timed_out = self.retries.tick_timeouts(&mut self.core, ticks.limit, ticks.grace);
        if timed_out.is_long_running {
            controller.note_long_running();
        }
        if !timed_out.late.is_empty() {
            count(&controller.counters.late, timed_out.late.len() as u64);
            let acl = usize::from(controller.info.identity.acl);
            let most = timed_out.late.len().min(ABORTS).min(acl + 1);
            let sqid = self.core.qid();
            tracing::warn!(
                qid = sqid,
                "{}: {} commands were not completed within {:?}; aborting {most} of them",
                controller.name(),
                timed_out.late.len(),
                controller.plane().device.timeouts.io
            );
            for cid in timed_out.late.into_iter().take(most) {
                if controller.plane().queue.send(Sqe::abort(Abort { sqid, cid }, 0)) {
                    count(&controller.counters.aborts, 1);
                }
            }
        }
        if timed_out.overdue { self.recreate(controller) } else { Ok(true) }
    }

    /// Deletes the queues and creates them again, because Abort has not ended late commands.
    fn recreate(&mut self, controller: &AttachedController) -> Result<bool, String> {
        let qid = self.core.qid();
        let mut io_queues = controller.enabled.io_queues();
        let state = controller.state();
        if state.condition() != Condition::Live || state.generation() != self.generation {
            return Ok(false);
        }
        tracing::warn!(
            qid,
            "{}: late commands were not aborted; creating the queue pair again",
            controller.name()
        );
        count(&controller.counters.queues_recreated, 1);
        let deleted = io_queues.delete_at_controller(controller.plane(), qid);
        deleted.map_err(|error| error.to_string())?;
        self.create_queues(controller, &mut io_queues)?;
        Ok(true)
    }

    /// Creates the queues again after a controller reset.
    fn restore(
        &mut self,
        controller: &AttachedController,
        generation: u32,
    ) -> Result<bool, String> {
        let mut io_queues = controller.enabled.io_queues();
        let state = controller.state();
        if state.condition() != Condition::Live || state.generation() != generation {
            return Ok(false);
        }
        count(&controller.counters.queues_restored, 1);
        self.create_queues(controller, &mut io_queues)?;
        self.generation = generation;
        Ok(false)
    }

    /// Creates the queues again, and submits repeatable outstanding commands again. The controller
    /// has deleted the old queues before this call.
    fn create_queues(
        &mut self,
        controller: &AttachedController,
        io_queues: &mut IoQueueTable,
    ) -> Result<(), String> {
        let (admin, info) = (controller.plane(), &controller.info);
        let qid = self.core.qid();
        let sizes = [self.layout.sq, self.layout.cq];
        let restarted = self.retries.restart(&mut self.core, doorbells(admin, info, qid, sizes));
        count(&controller.counters.repeated, restarted.repeated);
        count(&controller.counters.ended, restarted.ended);
        if restarted.ended != 0 {
            tracing::warn!(qid, "{} commands were ended with an unknown outcome", restarted.ended);
        }
        io_queues.recreate(admin, info, &mut self.core, self.layout, &self.event)?;
        // A failure of the register write is ignored here: the next call that rings the doorbell
        // reports it.
        let _ = self.core.ring();
        Ok(())
    }
}
