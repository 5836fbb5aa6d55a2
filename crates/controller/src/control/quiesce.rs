//! Transitions of quiesce: start, progress, completion and end.

use super::Control;
use super::deferred::{Callback, Deferred};
use super::quiesce_state::Step;
use crate::context::Context;
use crate::notice::Notice;
use crate::worker::mailbox::Message;
use crate::worker::queue_move::Departure;

impl Control {
    /// Starts to quiesce the controller. `done` is called when it is quiesced, or dropped if the
    /// quiesce is cancelled.
    pub(crate) fn begin_quiesce(&mut self, done: Callback) -> Deferred {
        let mut deferred = Deferred::default();
        if self.quiesce.step == Step::Quiesced {
            deferred.callbacks.push(done);
        } else {
            self.quiesce.waiting.push(done);
        }
        if self.quiesce.step == Step::Running {
            self.quiesce.step = Step::Requested;
        }
        deferred
    }

    /// Continues a requested quiesce. `admin_is_quiet` is true if no admin command is in flight.
    pub(crate) fn advance_quiesce(
        &mut self,
        cx: &Context,
        admin_is_quiet: bool,
        deferred: &mut Deferred,
    ) {
        if self.quiesce.step != Step::Requested || !admin_is_quiet || !self.is_quiet(cx) {
            return;
        }
        self.quiesce.step = Step::Leaving;
        let (controller, latch) = (cx.shared.id, cx.latch(Notice::Left));
        cx.route.begin_quiesce(&cx.pool, self.queues.workers(), |to| {
            let departure = Departure { to, latch: latch.clone() };
            Message::Leave { controller, departure }
        });
        deferred.latches.push(latch);
    }

    /// True if no operation is pending that a quiesce has to wait for.
    pub(super) fn is_quiet(&self, cx: &Context) -> bool {
        self.lifecycle.is_quiet()
            && !self.memory.is_awaited()
            && self.commands.is_quiet()
            && cx.lba_status.is_quiet()
            && self.queues.is_quiet()
            && self.namespace_changes.is_quiet()
            && self.exclusive.is_quiet()
            && !self.port.has_orders()
            && !cx.route.is_leaving()
    }

    /// Completes the quiesce after the queues have left their I/O threads, or returns the queues
    /// if the quiesce was cancelled.
    pub(super) fn queues_left(&mut self, cx: &Context, deferred: &mut Deferred) {
        match self.quiesce.step {
            Step::Leaving => {
                self.quiesce.step = Step::Quiesced;
                deferred.callbacks.append(&mut self.quiesce.waiting);
            }
            Step::Returning => {
                cx.route.end_quiesce(&cx.pool);
                let is_wanted = !self.quiesce.waiting.is_empty();
                self.quiesce.step = if is_wanted { Step::Requested } else { Step::Running };
            }
            Step::Running | Step::Requested | Step::Quiesced => {}
        }
    }

    /// Ends or cancels the quiesce. Returns the callbacks that waited for it; the caller drops them
    /// without the lock.
    pub(crate) fn end_quiesce(&mut self, cx: &Context) -> Vec<Callback> {
        let controller = cx.shared.id;
        self.quiesce.step = match self.quiesce.step {
            Step::Running | Step::Requested => Step::Running,
            Step::Leaving | Step::Returning => {
                cx.route.cancel_quiesce(&cx.pool, || Message::Stay { controller });
                Step::Returning
            }
            Step::Quiesced => {
                cx.route.end_quiesce(&cx.pool);
                Step::Running
            }
        };
        std::mem::take(&mut self.quiesce.waiting)
    }
}
