//! One command at a time, for those that have to be [alone](crate::exec): who may carry out what
//! it has parked, and when all others go on.
//!
//! Workers fetch nothing more and let what is under way end; then each has its turn; then what has
//! changed is recorded; then all go on. None of that waits for a relocation or for a rest: what is
//! said goes to wherever queues are, and queues that arrive somewhere see what holds
//! (`ControllerShared::is_one_alone`). A host that wants it again and again has its admin budget to
//! pay with (`plane`).

use super::Control;
use super::deferred::Deferred;
use super::io_queues::ended;
use super::one_alone::{OneAlone, Stage};
use super::rest::Step;
use crate::context::Context;
use crate::notice::Operation;
use crate::worker::message::Message;
use std::sync::Arc;

impl Control {
    /// Whether there are commands that have to be alone.
    pub(crate) fn has_one_alone(&self) -> bool {
        !self.alone.is_quiet()
    }

    /// Begins with what is wanted, if nothing of before is under way.
    pub(crate) fn advance_alone(&mut self, cx: &Context, deferred: &mut Deferred) {
        let rests = self.rest.step == Step::Resting;
        if self.alone.stage != Stage::Nothing || !self.alone.is_wanted || !self.is_ready() || rests
        {
            return;
        }
        let workers = cx.route.everywhere(self.queues.workers());
        self.alone = OneAlone {
            is_wanted: false,
            stage: Stage::Pausing,
            left: workers.clone(),
            workers,
            marks: cx.shared.uncorrectable(),
        };
        cx.shared.set_one_alone(true);
        let latch = cx.latch(ended(self.lifecycle.generation, Operation::Pause));
        for worker in &self.alone.workers {
            let (controller, latch) = (cx.shared.id, latch.clone());
            cx.pool.send(*worker, Message::Pause { controller, latch });
        }
        deferred.latches.push(latch);
    }

    /// Nothing is under way, or a worker has had its turn.
    pub(super) fn next_alone(&mut self, cx: &Context, deferred: &mut Deferred) {
        let next = self.alone.left.pop();
        let (stage, operation) = match next {
            Some(_) => (Stage::Turns, Operation::Alone),
            None => (Stage::Recording, Operation::Recorded),
        };
        self.alone.stage = stage;
        let latch = cx.latch(ended(self.lifecycle.generation, operation));
        if let Some(worker) = next {
            let (controller, latch) = (cx.shared.id, latch.clone());
            cx.pool.send(worker, Message::RunExclusive { controller, latch });
        }
        // Latches are let go of when the record is made.
        deferred.latches.push(latch);
    }

    /// What has changed is recorded.
    pub(super) fn alone_recorded(&mut self, cx: &Context, deferred: &mut Deferred) {
        if Arc::ptr_eq(&self.alone.marks, &cx.shared.uncorrectable()) {
            return self.alone_settled(cx);
        }
        let latch = cx.latch(ended(self.lifecycle.generation, Operation::Settled));
        for worker in &self.alone.workers {
            let (controller, latch) = (cx.shared.id, latch.clone());
            cx.pool.send(*worker, Message::Settle { controller, latch });
        }
        deferred.latches.push(latch);
    }

    /// All go on.
    pub(super) fn alone_settled(&mut self, cx: &Context) {
        self.alone.marks = Arc::default();
        self.alone.stage = Stage::Nothing;
        cx.shared.set_one_alone(false);
        // Queues that have arrived somewhere meanwhile are closed as well.
        self.alone.workers.clear();
        for worker in cx.route.everywhere(self.queues.workers()) {
            cx.pool.send(worker, Message::EndExclusive { controller: cx.shared.id });
        }
    }

    /// A reset: nobody waits any more.
    pub(super) fn forget_alone(&mut self, cx: &Context) {
        self.alone = OneAlone::default();
        cx.shared.set_one_alone(false);
    }
}
