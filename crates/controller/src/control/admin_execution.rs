//! Admin commands, for whoever serves the admin queue.

use super::admin::{Executed, Orders, Outcome};
use super::commands::AdminCommands;
use super::deferred::Deferred;
use super::rest::Step;
use super::{Control, Standing};
use crate::context::Context;
use crate::queue::admin::AdminCompletion;
use shadowbell_spec::Sqe;
use shadowbell_spec::status::Status;

impl Control {
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

    pub(super) fn admin_failed(&mut self, sqe: &Sqe, status: Status) {
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
