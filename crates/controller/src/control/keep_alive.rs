//! A host that is not heard of any more.

use super::Control;
use super::deferred::Deferred;
use super::io_queues::ended;
use super::rest::Step;
use crate::context::Context;
use crate::notice::Operation;
use crate::worker::message::Message;
use shadowbell_spec::regs::SHST_NORMAL;
use shadowbell_spec::status::Status;
use std::time::Instant;

impl Control {
    /// Looks whether the host has been silent for longer than it said it would. Whether it has.
    pub(crate) fn watch_host(
        &mut self,
        cx: &Context,
        now: Instant,
        deferred: &mut Deferred,
    ) -> bool {
        // Base 2.1, 3.9: it counts while the controller is ready, and is not being shut down. At
        // rest nobody listens.
        let listens = self.is_ready()
            && self.registers.csts.shst() == SHST_NORMAL
            && self.rest.step == Step::Working;
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

    /// When to look for that again, or for anything else that is due, if somebody has to and nobody
    /// will.
    pub(crate) fn next_watch(&mut self, now: Instant) -> Option<Instant> {
        let due = self.next_due();
        self.commands.keep_alive().next_look(now).into_iter().chain(due).min()
    }

    /// An entry in the error log, a fatal status, and no command is carried out any more.
    fn host_is_gone(&mut self, cx: &Context, deferred: &mut Deferred) {
        self.port.no_command_failed(Status::KEEP_ALIVE_TIMER_EXPIRED);
        let why = "the host gave no Keep Alive command for as long as it had promised";
        self.fail(cx, why, deferred);
        // The queues let go of everything, as at a reset, which alone can follow. Nobody waits for
        // them: what ends is of a time before.
        let before = self.lifecycle.generation.wrapping_sub(1);
        let latch = cx.latch(ended(before, Operation::Reset));
        cx.send_all(self.queues.workers(), |controller| Message::Detach {
            controller,
            latch: latch.clone(),
        });
        deferred.latches.push(latch);
    }
}
