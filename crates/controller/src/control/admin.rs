//! The admin queue pair with what is answered through it: completions, events, the error log.

use crate::admin::events::{AsyncEvents, Completion};
use crate::admin::logs::{ErrorLog, ErrorRecord};
use crate::queue::admin::AdminQueue;
use crate::shared::ControllerShared;
use crate::stats::Stats;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// SQID and CID of an error that no command is to blame for.
const NO_COMMAND: u16 = 0xffff;

/// What became of an admin command.
pub(crate) enum Outcome {
    /// It is complete, with this in dword 0.
    Done(u32),
    /// It completes later, by [`AdminPort::complete`].
    Later,
}

/// How an admin command was executed.
pub(crate) type Executed = Result<Outcome, Status>;

/// The admin queue pair with what is answered through it.
pub(super) struct AdminPort {
    shared: Arc<ControllerShared>,
    /// `None` while the controller is disabled.
    pub(super) queue: Option<AdminQueue>,
    pub(super) errors: ErrorLog,
    pub(super) events: AsyncEvents,
}

impl AdminPort {
    pub(super) fn new(shared: Arc<ControllerShared>) -> Self {
        Self { shared, queue: None, errors: ErrorLog::default(), events: AsyncEvents::default() }
    }

    /// Completes an admin command.
    pub(super) fn complete(&mut self, cid: u16, status: Status, dw0: u32) {
        if let Some(queue) = &mut self.queue {
            queue.complete(cid, status, dw0);
            queue.post(&self.shared);
        }
    }

    /// Completes an admin command in an error, which goes to the error log.
    pub(super) fn fail(&mut self, cid: u16, status: Status, nsid: u32) {
        self.log_error(0, cid, status, nsid, 0);
        self.complete(cid, status, 0);
    }

    /// Completes an Asynchronous Event Request, if there is one to complete.
    pub(super) fn complete_event(&mut self, event: Option<Completion>) {
        if let Some(Completion { cid, dw0 }) = event {
            self.complete(cid, Status::SUCCESS, dw0);
        }
    }

    /// Raises an asynchronous event.
    pub(super) fn raise(&mut self, event: AsyncEvent) {
        let completion = self.events.raise(event);
        self.complete_event(completion);
    }

    /// A doorbell was written that no queue has, or with a value that can not be. The event is
    /// about the error log, so the log has an entry: of no command, with the status that fits
    /// best (Base 2.1, 5.1.2, "Error Status", and 5.1.12.1.2, "Error Information").
    pub(super) fn doorbell_error(&mut self, event: AsyncEvent) {
        let status = if event == AsyncEvent::INVALID_DOORBELL_REGISTER {
            Status::INVALID_QID
        } else {
            Status::INVALID_FIELD
        };
        self.log_error(NO_COMMAND, NO_COMMAND, status, 0, 0);
        self.raise(event);
    }

    pub(super) fn log_error(&mut self, sqid: u16, cid: u16, status: Status, nsid: u32, lba: u64) {
        self.errors.push(ErrorRecord { sqid, cid, status, nsid, lba });
    }

    /// Posts what is complete, as far as there is room.
    pub(super) fn post(&mut self) {
        if let Some(queue) = &mut self.queue {
            queue.post(&self.shared);
        }
    }

    /// The queue pair is gone.
    pub(super) fn retire(&mut self) {
        if let Some(queue) = self.queue.take() {
            queue.retire(&self.shared);
        }
    }

    /// The counters of the admin queue pair.
    pub(super) fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        if let Some(queue) = &self.queue {
            let (sq, cq) = queue.snapshot(&self.shared);
            stats.submission_queues.push(sq);
            stats.completion_queues.push(cq);
        }
        stats
    }
}
