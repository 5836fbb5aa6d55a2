//! Execution of admin commands for the admin queue server.

use super::admin::{Executed, Orders, Outcome};
use super::commands::AdminCommands;
use super::deferred::Deferred;
use super::quiesce_state::Step;
use super::{Control, Standing};
use crate::context::Context;
use crate::queue::admin::AdminCompletion;
use shadowbell_spec::Sqe;
use shadowbell_spec::status::Status;

impl Control {
    /// Number of bytes that an admin command transfers from the host, read before its execution.
    pub(crate) fn data_length(sqe: &Sqe) -> usize {
        AdminCommands::data_length(sqe)
    }

    /// True if the admin queue server has orders.
    pub(crate) fn has_admin_orders(&self) -> bool {
        self.port.has_orders()
    }

    /// Takes the orders for the admin queue server. `has_fetched` is true if it fetched a command.
    pub(crate) fn admin_orders(&mut self, has_fetched: bool) -> (Orders, Standing) {
        let orders = self.port.take_orders(has_fetched);
        let (ready, begins) = (self.is_ready(), self.quiesce.step == Step::Running);
        let quiesced = self.quiesce.step == Step::Quiesced;
        (orders, Standing { ready, begins, quiesced, page_size: self.registers.page_size() })
    }

    /// Executes an admin command that was fetched in reset generation `generation`. `data` is the
    /// data from the host, or the error in reading it. `None` if a reset has begun since or the
    /// controller is in a fatal state: the command is dropped.
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

    /// Marks a command as completed by the admin queue server.
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

    pub(super) fn admin_failed(&mut self, sqe: &Sqe, status: Status) {
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

    /// Enters a fatal state, because a command cannot be completed without a completion queue.
    pub(crate) fn lacks_admin_cq(&mut self, cx: &Context, deferred: &mut Deferred) {
        let why = "the admin completion queue is not in memory that the host shared";
        self.fail(cx, why, deferred);
    }
}
