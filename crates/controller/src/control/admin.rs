//! What is answered through the admin queue: completions, events, the error log. The queue itself
//! belongs to whoever serves it (`admin_server`), who gets its orders from here.

use super::admin_progress::AdminProgress;
use crate::admin::events::{AsyncEvents, Completion};
use crate::admin::logs::{ErrorLog, ErrorRecord};
use crate::latch::Latch;
use crate::queue::admin::{AdminCompletion, AdminQueue};
use shadowbell_memory::DmaTable;
use shadowbell_spec::Sqe;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// SQID and CID of an error that no command is to blame for.
const NO_COMMAND: u16 = 0xffff;

/// What became of an admin command.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It is complete, with this in dword 0.
    Done(u32),
    /// It is complete as soon as the host has these data.
    Data(Data),
    /// It completes later, by [`AdminPort::complete`].
    Later,
    /// It completes when there is something to tell, or never, and its place in the completion
    /// queue is not kept for it until then.
    Unplaced,
    /// It can not be begun before another one has ended.
    NotYet,
}

/// What a command gives its host.
#[derive(Debug)]
pub(crate) struct Data {
    pub(crate) bytes: Vec<u8>,
    /// How many the command is about, which may be more.
    pub(crate) len: usize,
    /// Dword 0 of the completion.
    pub(crate) dw0: u32,
    /// The log page that the host has read then, and whether it wants to keep its event.
    pub(crate) log: Option<(u8, bool)>,
}

/// How an admin command was executed.
pub(crate) type Executed = Result<Outcome, Status>;

/// An admin queue, to be served.
pub(crate) struct Attach {
    pub(crate) queue: AdminQueue,
    pub(crate) table: Arc<DmaTable>,
    /// Resets that there have been.
    pub(crate) generation: u64,
    /// The buffers of Doorbell Buffer Config, if the queue has been in use with them.
    pub(crate) shadow: Option<(u64, u64)>,
}

/// What whoever serves the admin queue has to do, in the order of the fields.
#[derive(Default)]
pub(crate) struct Orders {
    /// A reset has begun: forget the queue, and then let go of this.
    pub(crate) detach: Option<Latch>,
    /// The controller is enabled.
    pub(crate) attach: Option<Attach>,
    /// There is another DMA map.
    pub(crate) table: Option<Arc<DmaTable>>,
    /// To be let go when no other map is in use.
    pub(crate) latches: Vec<Latch>,
    /// There are other Shadow Doorbell and EventIdx buffers, or none any more.
    pub(crate) shadow: Option<Option<(u64, u64)>>,
    /// The completion queue is elsewhere.
    pub(crate) acq: Option<u64>,
    /// These commands are complete.
    pub(crate) completions: Vec<AdminCompletion>,
    /// And these as soon as the host has the data.
    pub(crate) answers: Vec<(Sqe, Data)>,
}

impl Orders {
    pub(crate) fn is_empty(&self) -> bool {
        let Self { detach, attach, table, latches, shadow, acq, completions, answers } = self;
        detach.is_none()
            && attach.is_none()
            && table.is_none()
            && latches.is_empty()
            && shadow.is_none()
            && acq.is_none()
            && completions.is_empty()
            && answers.is_empty()
    }
}

/// What is answered through the admin queue.
#[derive(Default)]
pub(super) struct AdminPort {
    /// There is an admin queue: the controller is enabled, and no reset has begun.
    open: bool,
    /// A command was fetched.
    used: bool,
    orders: Orders,
    pub(super) progress: AdminProgress,
    pub(super) errors: ErrorLog,
    pub(super) events: AsyncEvents,
}

impl AdminPort {
    /// The controller is enabled.
    pub(super) fn open(&mut self, attach: Attach) {
        (self.open, self.used) = (true, false);
        self.progress = AdminProgress::default();
        self.orders.attach = Some(attach);
    }

    /// A reset begins. `latch` is let go when the queue is not touched any more. What was to be
    /// answered concerns nobody.
    pub(super) fn close(&mut self, latch: Latch) {
        self.open = false;
        let latches = std::mem::take(&mut self.orders.latches);
        self.orders = Orders { detach: Some(latch), latches, ..Orders::default() };
    }

    /// A queue that nobody has begun to serve.
    pub(super) fn unserved(&self) -> Option<&AdminQueue> {
        self.orders.attach.as_ref().map(|attach| &attach.queue)
    }

    /// The controller goes on from a state in which its queue was served. `used`: a command was
    /// fetched.
    pub(super) fn reopen(&mut self, attach: Attach, used: bool) {
        (self.open, self.used) = (true, used);
        self.orders.attach = Some(attach);
    }

    /// Whether a command was fetched since the controller was enabled.
    pub(super) fn is_used(&self) -> bool {
        self.used
    }

    /// Whether there is something to do for whoever serves the queue.
    pub(super) fn has_orders(&self) -> bool {
        !self.orders.is_empty()
    }

    /// What there is to do for whoever serves the queue, who `has_fetched` a command.
    pub(super) fn take_orders(&mut self, has_fetched: bool) -> Orders {
        self.used |= has_fetched;
        std::mem::take(&mut self.orders)
    }

    /// There is another DMA map; `latch` is let go when the one before is not used any more.
    pub(super) fn change_table(&mut self, table: &Arc<DmaTable>, latch: Option<&Latch>) {
        if self.open {
            self.orders.table = Some(Arc::clone(table));
        }
        self.orders.latches.extend(latch.cloned());
    }

    /// Doorbell Buffer Config, or the end of it.
    pub(super) fn change_shadow(&mut self, pages: Option<(u64, u64)>) {
        self.orders.shadow = Some(pages);
    }

    /// `latch` is let go when all orders up to here were followed.
    pub(super) fn when_followed(&mut self, latch: &Latch) {
        self.orders.latches.push(latch.clone());
    }

    /// Puts the completion queue elsewhere, as long as no command was fetched. Whether it is.
    ///
    /// ACQ has to be written before CC.EN; QEMU's `nvme://` driver, whose compiler knows nothing of
    /// that, writes it after, and lives with controllers that do not look before the first command.
    pub(super) fn place_cq(&mut self, acq: u64) -> bool {
        let is_possible = self.open && !self.used;
        if is_possible {
            self.orders.acq = Some(acq);
        }
        is_possible
    }

    /// Completes an admin command whose place was kept.
    pub(super) fn complete(&mut self, cid: u16, status: Status, dw0: u32) {
        self.push(AdminCompletion { cid, status, dw0, placed: true });
    }

    /// Gives the host the data of a command whose place was kept, and completes it.
    pub(super) fn answer(&mut self, sqe: Sqe, data: Data) {
        if self.open {
            self.orders.answers.push((sqe, data));
        }
    }

    /// Completes an Asynchronous Event Request.
    pub(super) fn complete_unplaced(&mut self, cid: u16, status: Status, dw0: u32) {
        self.push(AdminCompletion { cid, status, dw0, placed: false });
    }

    fn push(&mut self, completion: AdminCompletion) {
        if self.open {
            self.progress.end(completion);
            self.orders.completions.push(completion);
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
            self.complete_unplaced(cid, Status::SUCCESS, dw0);
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
        self.no_command_failed(status);
        self.raise(event);
    }

    /// An error that no command is to blame for.
    pub(super) fn no_command_failed(&mut self, status: Status) {
        self.log_error(NO_COMMAND, NO_COMMAND, status, 0, 0);
    }

    pub(super) fn log_error(&mut self, sqid: u16, cid: u16, status: Status, nsid: u32, lba: u64) {
        self.errors.push(ErrorRecord { sqid, cid, status, nsid, lba });
    }
}
