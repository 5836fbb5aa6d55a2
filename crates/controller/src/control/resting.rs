//! A controller that comes to rest, so that another process can go on with it.

use super::Control;
use super::deferred::{Callback, Deferred};
use super::rest::Step;
use crate::context::Context;
use crate::notice::Notice;
use crate::worker::message::Message;
use crate::worker::queue_move::Departure;

impl Control {
    /// Has the controller come to rest; `done` is called when it does, or dropped if that is called
    /// off.
    pub(crate) fn begin_rest(&mut self, done: Callback) -> Deferred {
        let mut deferred = Deferred::default();
        if self.rest.step == Step::Resting {
            deferred.callbacks.push(done);
        } else {
            self.rest.waiting.push(done);
        }
        if self.rest.step == Step::Working {
            self.rest.step = Step::Asked;
        }
        deferred
    }

    /// Goes on towards a rest, if one was asked for. `admin_is_quiet`: no admin command is under
    /// way.
    pub(crate) fn advance_rest(
        &mut self,
        cx: &Context,
        admin_is_quiet: bool,
        deferred: &mut Deferred,
    ) {
        if self.rest.step != Step::Asked || !admin_is_quiet || !self.is_quiet(cx) {
            return;
        }
        self.rest.step = Step::Leaving;
        let (controller, latch) = (cx.shared.id, cx.latch(Notice::Left));
        cx.route.begin_rest(&cx.pool, self.queues.workers(), |to| {
            let departure = Departure { to, latch: latch.clone() };
            Message::Leave { controller, departure }
        });
        deferred.latches.push(latch);
    }

    /// Whether nobody waits for anything.
    pub(super) fn is_quiet(&self, cx: &Context) -> bool {
        self.lifecycle.is_quiet()
            && !self.memory.is_awaited()
            && self.commands.is_quiet()
            && cx.lba_status.is_quiet()
            && self.queues.is_quiet()
            && self.namespace_changes.is_quiet()
            && self.alone.is_quiet()
            && !self.port.has_orders()
            && !cx.route.is_leaving()
    }

    /// The queues have left their workers.
    pub(super) fn queues_left(&mut self, cx: &Context, deferred: &mut Deferred) {
        match self.rest.step {
            Step::Leaving => {
                self.rest.step = Step::Resting;
                deferred.callbacks.append(&mut self.rest.waiting);
            }
            Step::Returning => {
                cx.route.end_rest(&cx.pool);
                let is_wanted = !self.rest.waiting.is_empty();
                self.rest.step = if is_wanted { Step::Asked } else { Step::Working };
            }
            Step::Working | Step::Asked | Step::Resting => {}
        }
    }

    /// Has the controller go on here. Who has waited for its rest is returned, to be dropped
    /// without the lock.
    pub(crate) fn end_rest(&mut self, cx: &Context) -> Vec<Callback> {
        let controller = cx.shared.id;
        self.rest.step = match self.rest.step {
            Step::Working | Step::Asked => Step::Working,
            Step::Leaving | Step::Returning => {
                cx.route.call_off_rest(&cx.pool, || Message::Stay { controller });
                Step::Returning
            }
            Step::Resting => {
                cx.route.end_rest(&cx.pool);
                Step::Working
            }
        };
        std::mem::take(&mut self.rest.waiting)
    }
}
