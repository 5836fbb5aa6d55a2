//! Moving a controller to another I/O thread.

use super::Control;
use super::deferred::Deferred;
use super::quiesce_state::Step;
use crate::context::Context;
use crate::event::Event;
use crate::notice::Notice;
use crate::route::RelocateError;
use crate::worker::mailbox::Message;
use crate::worker::queue_move::Departure;
use std::time::Duration;

impl Control {
    /// Moves a controller whose passes take too long to a dedicated I/O thread.
    pub(super) fn too_slow(&mut self, cx: &Context, took: Duration, deferred: &mut Deferred) {
        match self.isolate(cx) {
            Ok(()) => {
                self.log_isolated(cx, took);
                deferred.event(Event::Isolated(took));
            }
            // The controller already has one, or is about to move to another process.
            Err(RelocateError::Placed | RelocateError::Frozen) => {}
            Err(error) => tracing::warn!(
                serial = cx.config.serial,
                %error,
                "the controller delays others for {took:?} at a time, and cannot be moved"
            ),
        }
    }

    /// Moves the controller to a dedicated I/O thread.
    pub(crate) fn isolate(&mut self, cx: &Context) -> Result<(), RelocateError> {
        self.check_relocation(cx)?;
        let worker = cx.pool.claim()?.ok_or(RelocateError::TooMany)?;
        self.relocate(cx, worker)
    }

    /// Moves the controller to I/O thread `worker`.
    pub(crate) fn pin_to(&mut self, cx: &Context, worker: usize) -> Result<(), RelocateError> {
        if worker >= cx.pool.len() {
            return Err(RelocateError::NoSuchWorker(worker, cx.pool.len()));
        }
        self.check_relocation(cx)?;
        self.relocate(cx, worker)
    }

    pub(super) fn check_relocation(&self, cx: &Context) -> Result<(), RelocateError> {
        if self.quiesce.step != Step::Running {
            Err(RelocateError::Frozen)
        } else if cx.route.is_diverted() {
            Err(RelocateError::Placed)
        } else {
            Ok(())
        }
    }

    pub(super) fn relocate(&mut self, cx: &Context, worker: usize) -> Result<(), RelocateError> {
        let Some(to) = cx.pool.destination(worker) else {
            return Err(RelocateError::NoSuchWorker(worker, cx.pool.len()));
        };
        cx.route.divert(&cx.pool, worker, self.queues.workers(), |from| {
            let latch = cx.latch(Notice::Relocated { from });
            let departure = Departure { to: to.clone(), latch };
            Message::Leave { controller: cx.shared.id, departure }
        });
        Ok(())
    }
}
