//! Control plane's side of the admin queue: completions, events and the error log. The admin queue
//! server (`admin_server`) owns the queue, and this module gives it orders.
//!
//! # Checkpoint
//!
//! [`AdminCheckpoint`] stores the admin queue positions for checkpoints, as of the control plane's
//! last action. So the positions and the control plane state in a checkpoint match, although the
//! queue itself may have advanced further.

use crate::admin::events::{AsyncEvents, Completion};
use crate::admin::logs::{ErrorLog, ErrorRecord};
use crate::notice::Latch;
use crate::queue::admin::{AdminCompletion, AdminQueue};
use crate::saved::{SavedAdminQueue, SavedCq, SavedDoorbell, SavedSq, SavedTruth};
use shadowbell_memory::DmaTable;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::regs::Aqa;
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_state::Bytes;
use std::sync::Arc;
use zerocopy::{IntoBytes, transmute};

/// SQID and CID of an error that no command caused.
const NO_COMMAND: u16 = 0xffff;

/// Outcome of an admin command.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Complete the command now, with this dword 0.
    Done(u32),
    /// Write these data to host memory, then complete the command.
    Data(Data),
    /// The control plane calls [`AdminPort::complete`] later.
    Pending,
    /// Asynchronous Event Request: completes when an event occurs, or never. No completion queue
    /// entry is reserved for it.
    Unplaced,
    /// The command cannot start before another command has ended.
    NotYet,
}

/// Data that an admin command returns to the host.
#[derive(Debug)]
pub(crate) struct Data {
    pub(crate) bytes: Vec<u8>,
    /// Transfer length of the command. It may exceed the length of `bytes`.
    pub(crate) len: usize,
    /// Dword 0 of the completion.
    pub(crate) dw0: u32,
    /// For Get Log Page, the log page identifier, and true if Retain Asynchronous Event (RAE) is
    /// set. The event is cleared when the data were written, unless it is retained.
    pub(crate) log: Option<(u8, bool)>,
}

/// Result of executing an admin command.
pub(crate) type Executed = Result<Outcome, Status>;

/// Admin queue that the admin queue server has to attach.
pub(crate) struct Attach {
    pub(crate) queue: AdminQueue,
    pub(crate) table: Arc<DmaTable>,
    /// Number of resets so far.
    pub(crate) generation: u64,
    /// Pages of Doorbell Buffer Config, if the host has already configured them.
    pub(crate) shadow: Option<(u64, u64)>,
}

/// Orders for the admin queue server, executed in the order of the fields.
#[derive(Default)]
pub(crate) struct Orders {
    /// Detach the queue for a reset or shutdown, and then drop the latch.
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
    pub(crate) replies: Vec<(Sqe, Data)>,
}

impl Orders {
    pub(crate) fn is_empty(&self) -> bool {
        let Self { detach, attach, table, latches, shadow, acq, completions, replies } = self;
        detach.is_none()
            && attach.is_none()
            && table.is_none()
            && latches.is_empty()
            && shadow.is_none()
            && acq.is_none()
            && completions.is_empty()
            && replies.is_empty()
    }
}

/// Control plane's side of the admin queue.
#[derive(Default)]
pub(super) struct AdminPort {
    /// True if an admin queue exists: the controller is enabled, and no reset or shutdown has
    /// started.
    open: bool,
    /// True if a command was fetched since the controller was enabled.
    used: bool,
    orders: Orders,
    pub(super) checkpoint: AdminCheckpoint,
    pub(super) errors: ErrorLog,
    pub(super) events: AsyncEvents,
}

impl AdminPort {
    /// Opens the admin queue after the controller was enabled.
    pub(super) fn open(&mut self, attach: Attach) {
        (self.open, self.used) = (true, false);
        self.checkpoint = AdminCheckpoint::default();
        self.orders.attach = Some(attach);
    }

    /// True if an admin queue exists.
    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    /// Closes the queue for a reset or shutdown, and drops pending completions. The admin queue
    /// server drops `latch` when it no longer accesses the queue.
    pub(super) fn close(&mut self, latch: Latch) {
        self.open = false;
        let mut latches = std::mem::take(&mut self.orders.latches);
        // The old latch also goes to the admin queue server: a latch must not be dropped under the
        // control plane's lock.
        latches.extend(self.orders.detach.take());
        self.orders = Orders { detach: Some(latch), latches, ..Orders::default() };
    }

    /// Admin queue that waits for the admin queue server to attach it.
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

    /// Takes the orders for the admin queue server. `has_fetched` is true if the server has fetched
    /// a command.
    pub(super) fn take_orders(&mut self, has_fetched: bool) -> Orders {
        self.used |= has_fetched;
        std::mem::take(&mut self.orders)
    }

    /// Replaces the DMA table. The admin queue server drops `latch` when it no longer uses the old
    /// table.
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

    /// Moves the completion queue to another address, if no command was fetched yet. Returns true
    /// if the queue is moved.
    ///
    /// ACQ has to be written before CC.EN. QEMU's `nvme://` driver writes ACQ afterwards, because
    /// the compiler reorders its register writes. The driver works with controllers that access the
    /// completion queue only after the first command was submitted. So this controller permits the
    /// change until then.
    pub(super) fn set_cq_address(&mut self, acq: u64) -> bool {
        let is_possible = self.open && !self.used;
        if is_possible {
            self.orders.acq = Some(acq);
        }
        is_possible
    }

    /// Completes an admin command, with the completion queue entry that was reserved when the
    /// command was fetched.
    pub(super) fn complete(&mut self, cid: u16, status: Status, dw0: u32) {
        self.push(AdminCompletion { cid, status, dw0, placed: true });
    }

    /// Writes data to host memory and completes a command with a reserved completion queue entry.
    pub(super) fn reply(&mut self, sqe: Sqe, data: Data) {
        if self.open {
            self.orders.replies.push((sqe, data));
        }
    }

    /// Completes an Asynchronous Event Request, which has no reserved completion queue entry.
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

    /// Posts `event`, the completion of an Asynchronous Event Request. Does nothing for `None`.
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

    /// Reports a write to a doorbell register without a queue, or an invalid doorbell value. The
    /// event refers to the error log, so an entry without a command is added, with the closest
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

/// Admin queue positions and commands for checkpoints.
#[derive(Debug)]
pub(super) struct AdminCheckpoint {
    /// Submission queue position after the last started command.
    head: u16,
    /// Commands in flight, without Asynchronous Event Requests, which are stored elsewhere.
    in_flight: Vec<Sqe>,
    /// Completed commands whose completions may not be posted yet.
    ended: Vec<AdminCompletion>,
    /// Completion queue position after the last post.
    tail: u16,
    phase: bool,
    /// Number of commands of the previous process that still have to be replayed. These commands
    /// are no longer in the submission queue.
    replays: usize,
}

impl Default for AdminCheckpoint {
    fn default() -> Self {
        let (in_flight, ended) = (Vec::new(), Vec::new());
        Self { head: 0, in_flight, ended, tail: 0, phase: true, replays: 0 }
    }
}

impl AdminCheckpoint {
    /// Records the start of a command of a queue with `entries` entries. If `stays` is true, the
    /// command is in flight until [`end`](Self::end); otherwise it is not stored.
    pub(super) fn begin(&mut self, sqe: &Sqe, entries: u32, stays: bool) {
        if self.replays != 0 {
            // A replayed command is already in the list of commands in flight.
            self.replays -= 1;
            if !stays {
                self.in_flight.retain(|other| other.cid != sqe.cid);
            }
            return;
        }
        self.head = ((u32::from(self.head) + 1) % entries.max(1)) as u16;
        if stays {
            self.in_flight.push(*sqe);
        }
    }

    /// True if the next command to start is a replay of a command of the previous process.
    pub(super) fn is_replayed(&self) -> bool {
        self.replays != 0
    }

    pub(super) fn end(&mut self, completion: AdminCompletion) {
        if let Some(at) = self.in_flight.iter().position(|sqe| sqe.cid == completion.cid) {
            self.in_flight.remove(at);
        }
        self.ended.push(completion);
    }

    /// Removes posted completions and stores the completion queue position after them.
    pub(super) fn posted(&mut self, (tail, phase): (u16, bool), cids: &[u16]) {
        (self.tail, self.phase) = (tail, phase);
        for cid in cids {
            if let Some(at) = self.ended.iter().position(|ended| ended.cid == *cid) {
                self.ended.remove(at);
            }
        }
    }

    pub(super) fn save(&self, (aqa, asq, acq): (Aqa, u64, u64), used: bool) -> SavedAdminQueue {
        // Doorbell values are stored in the journal, not here.
        let doorbell = SavedDoorbell { last: 0, truth: SavedTruth::Register, snapshot: None };
        let entries = |zero_based: u16| u32::from(zero_based) + 1;
        let staged = |completion: &AdminCompletion| {
            let &AdminCompletion { cid, status, dw0, .. } = completion;
            let [low, high]: [u64; 2] = transmute!(Cqe::new(cid, 0, self.head, status, dw0));
            (low, high)
        };
        SavedAdminQueue {
            sq: SavedSq {
                qid: 0,
                iova: asq,
                entries: entries(aqa.asqs()),
                cqid: 0,
                head: self.head,
                tail: doorbell,
            },
            cq: SavedCq {
                qid: 0,
                iova: acq,
                entries: entries(aqa.acqs()),
                vector: Some(0),
                tail: self.tail,
                phase: self.phase,
                head: doorbell,
                staged: self.ended.iter().map(staged).collect(),
            },
            used,
            lacks_cq: !used,
            in_flight: self.in_flight.iter().map(|sqe| Bytes(sqe.as_bytes().to_vec())).collect(),
        }
    }

    /// Recovers the state of a dead process. The process may have posted completions after its last
    /// checkpoint. So the queue position and the completions that remain to be posted (`to_post`)
    /// come from the completion queue in host memory.
    pub(super) fn recover(
        saved: &SavedAdminQueue,
        ((tail, phase), to_post): ((u16, bool), impl Iterator<Item = u16>),
    ) -> Self {
        use zerocopy::FromBytes;
        let in_flight: Vec<_> = saved
            .in_flight
            .iter()
            .filter_map(|bytes| Sqe::read_from_bytes(&bytes.0).ok())
            .collect();
        let ended = |&(low, high): &(u64, u64)| {
            let cqe: Cqe = transmute!([low, high]);
            AdminCompletion { cid: cqe.cid, status: cqe.status(), dw0: cqe.dw0, placed: false }
        };
        // Completions are posted in order, so those at the end of the list remain to be posted.
        let posted = saved.cq.staged.len().saturating_sub(to_post.count());
        Self {
            head: saved.sq.head,
            replays: in_flight.len(),
            in_flight,
            ended: saved.cq.staged.iter().skip(posted).map(ended).collect(),
            tail,
            phase,
        }
    }
}
