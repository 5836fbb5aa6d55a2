//! Coordination of [exclusive commands](crate::exec): no other command of the controller runs.
//!
//! The I/O threads stop fetching and let commands in flight end. Each of them then executes its
//! waiting exclusive commands, one I/O thread after the other. Changes are checkpointed, and all
//! I/O threads resume. The messages are sent even while the controller moves or quiesces, to all
//! I/O threads that may have its queues, and arriving queues check
//! `ControllerShared::is_exclusive`. A host that repeats exclusive commands is limited by its admin
//! budget (`control_plane`).

use super::Control;
use super::deferred::Deferred;
use super::exclusive_state::{Exclusive, Stage};
use super::io_queues::ended;
use super::quiesce_state::Step;
use crate::context::Context;
use crate::notice::Operation;
use crate::worker::mailbox::Message;
use std::sync::Arc;

impl Control {
    /// True if exclusive commands are waiting or running.
    pub(crate) fn has_exclusive(&self) -> bool {
        !self.exclusive.is_quiet()
    }

    /// Starts a round of exclusive commands, if one is requested and none is running.
    pub(crate) fn advance_exclusive(&mut self, cx: &Context, deferred: &mut Deferred) {
        let quiesced = self.quiesce.step == Step::Quiesced;
        if self.exclusive.stage != Stage::Nothing
            || !self.exclusive.is_wanted
            || !self.is_ready()
            || quiesced
        {
            return;
        }
        let workers = cx.route.everywhere(self.queues.workers());
        self.exclusive = Exclusive {
            is_wanted: false,
            stage: Stage::Pausing,
            left: workers.clone(),
            workers,
            marks: cx.shared.uncorrectable(),
        };
        cx.shared.set_exclusive(true);
        let latch = cx.latch(ended(self.lifecycle.generation, Operation::Pause));
        for worker in &self.exclusive.workers {
            let (controller, latch) = (cx.shared.id, latch.clone());
            cx.pool.send(*worker, Message::Pause { controller, latch });
        }
        deferred.latches.push(latch);
    }

    /// Continues after the pause or an I/O thread's turn: starts the next turn or the checkpoint.
    pub(super) fn next_exclusive(&mut self, cx: &Context, deferred: &mut Deferred) {
        let next = self.exclusive.left.pop();
        let (stage, operation) = match next {
            Some(_) => (Stage::Turns, Operation::Exclusive),
            None => (Stage::Recording, Operation::Recorded),
        };
        self.exclusive.stage = stage;
        let latch = cx.latch(ended(self.lifecycle.generation, operation));
        if let Some(worker) = next {
            let (controller, latch) = (cx.shared.id, latch.clone());
            cx.pool.send(worker, Message::RunExclusive { controller, latch });
        }
        // Deferred latches are dropped after the checkpoint, so the notice follows it.
        deferred.latches.push(latch);
    }

    /// Continues after the checkpoint. If the marked blocks have changed, the I/O threads first
    /// write the outcome of their commands to the journal, so that a recovery does not repeat them.
    pub(super) fn exclusive_recorded(&mut self, cx: &Context, deferred: &mut Deferred) {
        if Arc::ptr_eq(&self.exclusive.marks, &cx.shared.uncorrectable()) {
            return self.exclusive_settled(cx);
        }
        let latch = cx.latch(ended(self.lifecycle.generation, Operation::Settled));
        for worker in &self.exclusive.workers {
            let (controller, latch) = (cx.shared.id, latch.clone());
            cx.pool.send(*worker, Message::Settle { controller, latch });
        }
        deferred.latches.push(latch);
    }

    /// Ends the round: all I/O threads resume.
    pub(super) fn exclusive_settled(&mut self, cx: &Context) {
        self.exclusive.marks = Arc::default();
        self.exclusive.stage = Stage::Nothing;
        cx.shared.set_exclusive(false);
        // Queues that arrived at another I/O thread during the round are paused as well.
        self.exclusive.workers.clear();
        for worker in cx.route.everywhere(self.queues.workers()) {
            cx.pool.send(worker, Message::EndExclusive { controller: cx.shared.id });
        }
    }

    /// Drops the round and all requests, for a reset.
    pub(super) fn drop_exclusive(&mut self, cx: &Context) {
        self.exclusive = Exclusive::default();
        cx.shared.set_exclusive(false);
    }
}
