//! Control plane's side of the admin queue: completions, events and the error log. The admin queue
//! server (`admin_server`) owns the queue and gets its orders from this module.

use super::admin_checkpoint::AdminCheckpoint;
use crate::admin::events::{AsyncEvents, Completion};
use crate::admin::logs::{ErrorLog, ErrorRecord};
use crate::notice::Latch;
use crate::queue::admin::{AdminCompletion, AdminQueue};
use shadowbell_memory::DmaTable;
use shadowbell_spec::Sqe;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// SQID and CID of an error that no command caused.
const NO_COMMAND: u16 = 0xffff;

/// Outcome of an admin command.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Complete, with this dword 0.
    Done(u32),
    /// Complete when these data are in host memory.
    Data(Data),
    /// Completes later, by [`AdminPort::complete`].
    Later,
    /// Completes with an event, or never. No completion queue entry is reserved for it.
    Unplaced,
    /// Cannot start before another command has ended.
    NotYet,
}

/// Data of a command for its host.
#[derive(Debug)]
pub(crate) struct Data {
    pub(crate) bytes: Vec<u8>,
    /// Transfer length of the command, which may be larger.
    pub(crate) len: usize,
    /// Dword 0 of the completion.
    pub(crate) dw0: u32,
    /// Log page that the host has then read, and true if it retains the event (RAE).
    pub(crate) log: Option<(u8, bool)>,
}

/// Result of executing an admin command.
pub(crate) type Executed = Result<Outcome, Status>;

/// Admin queue for the admin queue server.
pub(crate) struct Attach {
    pub(crate) queue: AdminQueue,
    pub(crate) table: Arc<DmaTable>,
    /// Number of resets so far.
    pub(crate) generation: u64,
    /// Pages of Doorbell Buffer Config, if the queue was already used with them.
    pub(crate) shadow: Option<(u64, u64)>,
}

/// Orders for the admin queue server, executed in the order of the fields.
#[derive(Default)]
pub(crate) struct Orders {
    /// Detach the queue for a reset, and then drop the latch.
    pub(crate) detach: Option<Latch>,
    /// Attach the queue of the enabled controller.
    pub(crate) attach: Option<Attach>,
    /// Use another DMA table.
    pub(crate) table: Option<Arc<DmaTable>>,
    /// Latches to drop when the old DMA table is no longer used.
    pub(crate) latches: Vec<Latch>,
    /// Use other Shadow Doorbell and EventIdx pages, or none.
    pub(crate) shadow: Option<Option<(u64, u64)>>,
    /// Move the completion queue to another address.
    pub(crate) acq: Option<u64>,
    /// Complete these commands.
    pub(crate) completions: Vec<AdminCompletion>,
    /// Write these data to host memory, and complete their commands.
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

/// Control plane's side of the admin queue.
#[derive(Default)]
pub(super) struct AdminPort {
    /// True if an admin queue exists: the controller is enabled, and no reset has begun.
    open: bool,
    /// True if a command was fetched.
    used: bool,
    orders: Orders,
    pub(super) checkpoint: AdminCheckpoint,
    pub(super) errors: ErrorLog,
    pub(super) events: AsyncEvents,
}

impl AdminPort {
    /// Opens the admin queue of a controller that was enabled.
    pub(super) fn open(&mut self, attach: Attach) {
        (self.open, self.used) = (true, false);
        self.checkpoint = AdminCheckpoint::default();
        self.orders.attach = Some(attach);
    }

    /// Closes the queue for a reset, and drops pending completions. `latch` is dropped when the
    /// queue is no longer accessed.
    pub(super) fn close(&mut self, latch: Latch) {
        self.open = false;
        let latches = std::mem::take(&mut self.orders.latches);
        self.orders = Orders { detach: Some(latch), latches, ..Orders::default() };
    }

    /// Queue that the admin queue server has not attached yet.
    pub(super) fn unserved(&self) -> Option<&AdminQueue> {
        self.orders.attach.as_ref().map(|attach| &attach.queue)
    }

    /// Opens the queue of a restored controller. `used` is true if a command was fetched before.
    pub(super) fn reopen(&mut self, attach: Attach, used: bool) {
        (self.open, self.used) = (true, used);
        self.orders.attach = Some(attach);
    }

    /// True if a command was fetched since the controller was enabled.
    pub(super) fn is_used(&self) -> bool {
        self.used
    }

    /// True if the admin queue server has orders.
    pub(super) fn has_orders(&self) -> bool {
        !self.orders.is_empty()
    }

    /// Takes the orders for the admin queue server. `has_fetched` is true if it fetched a command.
    pub(super) fn take_orders(&mut self, has_fetched: bool) -> Orders {
        self.used |= has_fetched;
        std::mem::take(&mut self.orders)
    }

    /// Sets another DMA table. `latch` is dropped when the old table is no longer used.
    pub(super) fn change_table(&mut self, table: &Arc<DmaTable>, latch: Option<&Latch>) {
        if self.open {
            self.orders.table = Some(Arc::clone(table));
        }
        self.orders.latches.extend(latch.cloned());
    }

    /// Sets or removes the pages of Doorbell Buffer Config.
    pub(super) fn change_shadow(&mut self, pages: Option<(u64, u64)>) {
        self.orders.shadow = Some(pages);
    }

    /// Has `latch` dropped when all orders so far are executed.
    pub(super) fn when_followed(&mut self, latch: &Latch) {
        self.orders.latches.push(latch.clone());
    }

    /// Moves the completion queue to another address, unless a command was already fetched. Returns
    /// true if it is moved.
    ///
    /// ACQ has to be written before CC.EN. QEMU's `nvme://` driver writes it afterwards, because
    /// the compiler reorders its register writes, and works with controllers that do not use the
    /// completion queue before the first command.
    pub(super) fn place_cq(&mut self, acq: u64) -> bool {
        let is_possible = self.open && !self.used;
        if is_possible {
            self.orders.acq = Some(acq);
        }
        is_possible
    }

    /// Completes an admin command with a reserved completion queue entry.
    pub(super) fn complete(&mut self, cid: u16, status: Status, dw0: u32) {
        self.push(AdminCompletion { cid, status, dw0, placed: true });
    }

    /// Writes data to host memory and completes a command with a reserved completion queue entry.
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
            self.checkpoint.end(completion);
            self.orders.completions.push(completion);
        }
    }

    /// Completes an admin command with an error, and adds the error to the error log.
    pub(super) fn fail(&mut self, cid: u16, status: Status, nsid: u32) {
        self.log_error(0, cid, status, nsid, 0);
        self.complete(cid, status, 0);
    }

    /// Completes an Asynchronous Event Request, if `event` has one.
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

    /// Reports a write to a doorbell register without a queue, or an invalid value. The event
    /// refers to the error log, so an entry is added: without a command, and with the closest
    /// status (Base 2.1, 5.1.2, "Error Status", and 5.1.12.1.2, "Error Information").
    pub(super) fn doorbell_error(&mut self, event: AsyncEvent) {
        let status = if event == AsyncEvent::INVALID_DOORBELL_REGISTER {
            Status::INVALID_QID
        } else {
            Status::INVALID_FIELD
        };
        self.no_command_failed(status);
        self.raise(event);
    }

    /// Adds an error that no command caused to the error log.
    pub(super) fn no_command_failed(&mut self, status: Status) {
        self.log_error(NO_COMMAND, NO_COMMAND, status, 0, 0);
    }

    pub(super) fn log_error(&mut self, sqid: u16, cid: u16, status: Status, nsid: u32, lba: u64) {
        self.errors.push(ErrorRecord { sqid, cid, status, nsid, lba });
    }
}
