//! Expiry of the Keep Alive Timer.

use super::Control;
use super::deferred::Deferred;
use super::io_queues::ended;
use super::quiesce_state::Step;
use crate::context::Context;
use crate::notice::Operation;
use crate::worker::mailbox::Message;
use shadowbell_spec::regs::SHST_NORMAL;
use shadowbell_spec::status::Status;
use std::time::Instant;

impl Control {
    /// Checks the Keep Alive Timer. Returns true if it has expired.
    pub(crate) fn watch_host(
        &mut self,
        cx: &Context,
        now: Instant,
        deferred: &mut Deferred,
    ) -> bool {
        // Base 2.1, 3.9: the timer runs while the controller is ready and not shutting down. A
        // quiesced controller does not process Keep Alive commands, so the timer stops as well.
        let listens = self.is_ready()
            && self.registers.csts.shst() == SHST_NORMAL
            && self.quiesce.step == Step::Running;
        let timer = self.commands.keep_alive();
        if !listens {
            timer.restart(now);
            return false;
        }
        let is_gone = timer.expires(now);
        if is_gone {
            self.host_is_gone(cx, deferred);
        }
        is_gone
    }

    /// Time of the next timer turn for Keep Alive or background work; `None` if none is needed or
    /// one is already scheduled.
    pub(crate) fn next_watch(&mut self, now: Instant) -> Option<Instant> {
        let due = self.next_due();
        self.commands.keep_alive().next_look(now).into_iter().chain(due).min()
    }

    /// Adds an error log entry, enters a fatal state and stops command execution.
    fn host_is_gone(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.port.no_command_failed(Status::KEEP_ALIVE_TIMER_EXPIRED);
        let why = "the Keep Alive Timer expired without a command from the host";
        self.fail(cx, why, deferred);
        // The queues are detached as at a reset, because only a reset can follow. The notice has
        // the generation before this one, so it is ignored.
        let before = self.lifecycle.generation.wrapping_sub(1);
        let latch = cx.latch(ended(before, Operation::Reset));
        cx.send_all(self.queues.workers(), |controller| Message::Detach {
            controller,
            latch: latch.clone(),
        });
        deferred.latches.push(latch);
    }
}
