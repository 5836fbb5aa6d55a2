//! I/O queues in the control plane: records, creation, deletion and transfer to another process.
//!
//! * Records of the existing queues, and the I/O thread of each queue.
//! * Create and Delete I/O Submission and Completion Queue: checks, and completion of the command
//!   after the I/O thread has finished.
//! * Checkpoint, restore and recovery of the queues.

use super::admin_port::{AdminPort, Executed, Outcome};
use super::lifecycle_state::Deferred;
use super::memory::HostMemory;
use super::registers::Registers;
use crate::admin::self_test::Piece;
use crate::context::Context;
use crate::event::Event;
use crate::journal::RecoveredJournal;
use crate::notice::{Latch, Notice, Operation};
use crate::queue::QueueLayout;
use crate::restore_error::RestoreError;
use crate::saved::{SavedCq, SavedDoorbell, SavedPart, SavedSq, SavedTruth};
use crate::shared::DSTRD;
use crate::trace::{COMPLETION_QUEUE, Kind};
use crate::worker::mailbox::{Message, QueueContext};
use crate::worker::queue_move::{Relocated, Restoring, Stopover};
use crate::worker::queue_set::QueueOverride;
use shadowbell_doorbell::RingSize;
use shadowbell_memory::{EventFd, Ring};
use shadowbell_spec::admin::{CreateIoCq, CreateIoSq, DeleteIoQueue};
use shadowbell_spec::regs::{DoorbellKind, cq_doorbell_offset, sq_doorbell_offset};
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_state::Descriptors;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Eventfds whose signals replace doorbell writes of the host.
///
/// With shadow doorbells, a host writes a doorbell register only to wake a sleeping I/O thread; the
/// written value is not used. A signal of an eventfd has the same effect and is faster: it wakes
/// the I/O thread directly, without a message to the front end and a wakeup of the front end's
/// thread.
///
/// Each controller has its own eventfd on each I/O thread. With a shared one, the client of one
/// controller could read the eventfd and so consume the wakeups of other controllers.
#[derive(Debug, Default)]
pub struct DoorbellEventfds {
    /// Eventfds of I/O threads. After a signal, the I/O thread reads the doorbells.
    pub events: Vec<EventFd>,
    /// Offsets of doorbells in BAR0, each with the index of its eventfd.
    pub doorbells: Vec<(u64, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueState {
    Creating,
    Live,
    Deleting,
}

/// Record of a submission queue.
#[derive(Clone, Copy, Debug)]
struct SqRecord {
    layout: QueueLayout,
    cqid: u16,
    worker: usize,
    state: QueueState,
}

/// Record of a completion queue.
#[derive(Clone, Copy, Debug)]
struct CqRecord {
    layout: QueueLayout,
    vector: Option<u16>,
    worker: usize,
    state: QueueState,
}

impl SqRecord {
    /// True if the queue exists for the host: its creation has ended, and its deletion has not.
    fn exists(&self) -> bool {
        self.state != QueueState::Creating
    }
}

impl CqRecord {
    /// True if the queue exists for the host: its creation has ended, and its deletion has not.
    fn exists(&self) -> bool {
        self.state != QueueState::Creating
    }
}

/// Controller state on which the creation of a queue depends.
pub(super) struct QueueEnvironment<'a> {
    pub(super) registers: &'a Registers,
    pub(super) memory: &'a HostMemory,
    /// Number of resets so far.
    pub(super) generation: u64,
}

impl QueueEnvironment<'_> {
    /// Controller state that an I/O thread gets with a queue.
    fn context(
        &self,
        cx: &Context,
        overriding: Option<Box<dyn QueueOverride>>,
    ) -> Box<QueueContext> {
        Box::new(QueueContext {
            shared: Arc::clone(&cx.shared),
            control: cx.control.clone(),
            table: Arc::clone(self.memory.table()),
            namespaces: cx.visible(),
            page_size: self.registers.page_size(),
            max_transfer: 4096usize << cx.config.mdts,
            quota: cx.config.quota,
            generation: self.generation,
            shadow: self.memory.shadow,
            overriding,
        })
    }
}

/// Records of the existing I/O queues.
pub(super) struct IoQueues {
    sqs: BTreeMap<u16, SqRecord>,
    cqs: BTreeMap<u16, CqRecord>,
    /// Numbers of submission and completion queues that the host may create (feature 07h).
    granted: (u16, u16),
    /// I/O threads that have had queues of this controller since the last reset.
    workers: BTreeSet<usize>,
    /// Doorbell eventfds by I/O thread.
    doorbell_eventfds: BTreeMap<usize, EventFd>,
}

impl IoQueues {
    /// Creates records without queues. The host may create `io_queues` queues of each kind.
    pub(super) fn new(io_queues: u16) -> Self {
        Self {
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            granted: (io_queues, io_queues),
            workers: BTreeSet::new(),
            doorbell_eventfds: BTreeMap::new(),
        }
    }

    /// True if a completion queue has this interrupt vector.
    pub(super) fn has_vector(&self, vector: u16) -> bool {
        self.cqs.values().any(|cq| cq.exists() && cq.vector == Some(vector))
    }

    /// I/O threads that have had queues of this controller since the last reset.
    pub(super) fn workers(&self) -> impl Iterator<Item = usize> {
        self.workers.iter().copied()
    }

    /// Clears the set of I/O threads. All of them have detached the controller, or will do so.
    pub(super) fn clear_workers(&mut self) {
        self.workers.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sqs.is_empty() && self.cqs.is_empty()
    }

    /// True if a submission queue exists.
    pub(super) fn has_sqs(&self) -> bool {
        !self.sqs.is_empty()
    }

    /// True if no queue is being created or deleted.
    pub(super) fn is_idle(&self) -> bool {
        self.sqs.values().all(|sq| sq.state == QueueState::Live)
            && self.cqs.values().all(|cq| cq.state == QueueState::Live)
    }

    /// Numbers of submission and completion queues that the host may create.
    pub(super) fn granted(&self) -> (u16, u16) {
        self.granted
    }

    /// Addresses and numbers of entries of the completion queues.
    pub(super) fn completion_queues(&self) -> impl Iterator<Item = (u64, u32)> {
        self.cqs.values().map(|cq| (cq.layout.iova, cq.layout.size.entries()))
    }

    /// Sets feature 07h, Number of Queues.
    pub(super) fn grant(&mut self, submission: u16, completion: u16) {
        self.granted = (submission, completion);
    }

    /// I/O thread to which submission queue `sqid` was assigned.
    pub(super) fn worker_of(&self, sqid: u16) -> Option<usize> {
        self.sqs.get(&sqid).map(|sq| sq.worker)
    }

    /// Sends a flush of all namespaces to an I/O thread. The controller has to be enabled, but
    /// needs no queues, because writes of deleted queues are flushed as well. When the flush has
    /// ended, the control plane gets the notice that `operation` has ended.
    pub(super) fn flush(
        &mut self,
        cx: &Context,
        env: &QueueEnvironment<'_>,
        operation: Operation,
        overriding: Option<Box<dyn QueueOverride>>,
    ) {
        let worker = self.workers().next().unwrap_or_else(|| cx.pool.least_loaded());
        self.workers.insert(worker);
        let latch = cx.latch(ended_notice(env.generation, operation));
        let context = env.context(cx, overriding);
        cx.send(worker, Message::Flush { context, latch });
    }

    /// Sends the verification of `piece`, a byte range of a namespace, to an I/O thread. The
    /// controller and `operation` are as for [`flush`](Self::flush).
    pub(super) fn verify(
        &mut self,
        cx: &Context,
        env: &QueueEnvironment<'_>,
        piece: Piece,
        operation: Operation,
        overriding: Option<Box<dyn QueueOverride>>,
    ) {
        let worker = self.workers().next().unwrap_or_else(|| cx.pool.least_loaded());
        self.workers.insert(worker);
        let latch = cx.latch(ended_notice(env.generation, operation));
        let context = env.context(cx, overriding);
        cx.send(worker, Message::Verify { context, piece, latch });
    }

    /// Drops the doorbell eventfds at the start of a reset.
    pub(super) fn drop_eventfds(&mut self) {
        self.doorbell_eventfds.clear();
    }

    /// Removes all queues at the end of a reset.
    pub(super) fn reset(&mut self, cx: &Context) {
        for qid in std::mem::take(&mut self.sqs).into_keys() {
            cx.shared.set_owner(qid, DoorbellKind::Sq, None);
        }
        for (qid, record) in std::mem::take(&mut self.cqs) {
            cx.shared.set_owner(qid, DoorbellKind::Cq, None);
            cx.pool.unassign_queue(record.worker);
        }
        self.workers.clear();
        self.granted = (cx.config.io_queues, cx.config.io_queues);
    }

    /// Doorbell eventfds of the live queues.
    ///
    /// # Errors
    /// The error of the system if no more file descriptors are available.
    pub(super) fn doorbell_eventfds(&mut self, cx: &Context) -> io::Result<DoorbellEventfds> {
        let sqs =
            self.sqs.values().map(|q| (q.state, q.worker, sq_doorbell_offset(q.layout.qid, DSTRD)));
        let cqs =
            self.cqs.values().map(|q| (q.state, q.worker, cq_doorbell_offset(q.layout.qid, DSTRD)));
        let live: Vec<_> =
            sqs.chain(cqs).filter(|(state, ..)| *state == QueueState::Live).collect();
        let mut found = DoorbellEventfds::default();
        let mut indices = BTreeMap::new();
        for (_, worker, offset) in live {
            let index = match indices.get(&worker) {
                Some(index) => *index,
                None => {
                    found.events.push(self.doorbell_eventfd(cx, worker)?);
                    indices.insert(worker, found.events.len() - 1);
                    found.events.len() - 1
                }
            };
            found.doorbells.push((offset, index));
        }
        Ok(found)
    }

    /// Doorbell eventfd of this controller on I/O thread `worker`. It is created on the first call.
    fn doorbell_eventfd(&mut self, cx: &Context, worker: usize) -> io::Result<EventFd> {
        if let Some(event) = self.doorbell_eventfds.get(&worker) {
            return event.try_clone();
        }
        let event = EventFd::new()?;
        let (ours, theirs) = (event.try_clone()?, event.try_clone()?);
        let controller = cx.shared.id;
        cx.send(worker, Message::DoorbellEventfd { controller, event: theirs });
        self.doorbell_eventfds.insert(worker, ours);
        Ok(event)
    }
}

/// Notice at the end of an operation. The status is success, unless an I/O thread replaces it.
pub(super) fn ended_notice(generation: u64, operation: Operation) -> Notice {
    Notice::Ended { generation, operation, status: Status::SUCCESS }
}

/// Create and Delete I/O Submission and Completion Queue.
impl IoQueues {
    /// Checks queue identifier, size and address of a queue to create.
    fn check_layout<const ENTRY: usize>(
        &self,
        env: &QueueEnvironment<'_>,
        sqe: &Sqe,
        (qid, qsize0, contiguous): (u16, u16, bool),
    ) -> Result<QueueLayout, Status> {
        let granted = if ENTRY == Cqe::SIZE { self.granted.1 } else { self.granted.0 };
        if qid == 0 || qid > granted {
            return Err(Status::INVALID_QID.with_dnr());
        }
        let size = RingSize::from_zero_based(qsize0).filter(|_| qsize0 <= env.registers.cap.mqes());
        let Some(size) = size else { return Err(Status::INVALID_QUEUE_SIZE.with_dnr()) };
        // CAP.CQR: queues have to be contiguous.
        if !contiguous {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let iova = sqe.prp1();
        if !iova.is_multiple_of(env.registers.page_size() as u64) {
            return Err(Status::PRP_OFFSET_INVALID.with_dnr());
        }
        let write = ENTRY == Cqe::SIZE;
        let entries = size.entries();
        Ring::<ENTRY>::resolve(env.memory.table(), iova, entries, write).map_err(|fault| {
            tracing::warn!(qid, %fault, "the memory of the queue is not accessible");
            Status::INVALID_FIELD.with_dnr()
        })?;
        Ok(QueueLayout { qid, iova, size })
    }

    pub(super) fn create_cq(
        &mut self,
        cx: &Context,
        env: &QueueEnvironment<'_>,
        sqe: &Sqe,
        overriding: Option<Box<dyn QueueOverride>>,
    ) -> Executed {
        let command = CreateIoCq::decode(sqe);
        if self.cqs.contains_key(&command.qid) {
            return Err(Status::INVALID_QID.with_dnr());
        }
        // CC.IOCQES is the entry size as a power of two.
        if 1usize << env.registers.cc.iocqes() != Cqe::SIZE {
            return Err(Status::INVALID_QUEUE_SIZE.with_dnr());
        }
        let shape = (command.qid, command.qsize0, command.pc);
        let layout = self.check_layout::<{ Cqe::SIZE }>(env, sqe, shape)?;
        if command.ien && usize::from(command.iv) >= cx.shared.irqs.len() {
            return Err(Status::INVALID_INTERRUPT_VECTOR.with_dnr());
        }
        let vector = command.ien.then_some(command.iv);
        let worker = cx.pool.assign_queue();
        let state = QueueState::Creating;
        self.cqs.insert(command.qid, CqRecord { layout, vector, worker, state });
        self.workers.insert(worker);
        let context = env.context(cx, overriding);
        let operation = Operation::CreateCq { qid: command.qid, cid: sqe.cid };
        let latch = cx.latch(ended_notice(env.generation, operation));
        cx.send(worker, Message::CreateCq { context, layout, vector, latch });
        Ok(Outcome::Pending)
    }

    /// Completes Create I/O Completion Queue after the I/O thread has created the queue or failed.
    pub(super) fn cq_created(
        &mut self,
        cx: &Context,
        port: &mut AdminPort,
        (qid, cid): (u16, u16),
        status: Status,
    ) {
        let Some(cq) = self.cqs.get_mut(&qid) else { return };
        if !status.is_success() {
            cx.pool.unassign_queue(cq.worker);
            self.cqs.remove(&qid);
            return port.fail(cid, status, 0);
        }
        cq.state = QueueState::Live;
        let vector = cq.vector.map_or(u32::MAX, u32::from);
        cx.trace(Kind::QueueCreated, qid | COMPLETION_QUEUE, cq.layout.size.entries(), vector);
        cx.shared.set_owner(qid, DoorbellKind::Cq, Some(cx.route.resolve(cq.worker)));
        port.complete(cid, Status::SUCCESS, 0);
    }

    pub(super) fn create_sq(
        &mut self,
        cx: &Context,
        env: &QueueEnvironment<'_>,
        sqe: &Sqe,
    ) -> Executed {
        let command = CreateIoSq::decode(sqe);
        if command.cqid == 0 || command.cqid > self.granted.1 {
            return Err(Status::INVALID_QID.with_dnr());
        }
        let Some(cq) = self.cqs.get(&command.cqid).filter(|cq| cq.state == QueueState::Live) else {
            return Err(Status::CQ_INVALID.with_dnr());
        };
        let worker = cq.worker;
        if self.sqs.contains_key(&command.qid) {
            return Err(Status::INVALID_QID.with_dnr());
        }
        if 1usize << env.registers.cc.iosqes() != Sqe::SIZE {
            return Err(Status::INVALID_QUEUE_SIZE.with_dnr());
        }
        let shape = (command.qid, command.qsize0, command.pc);
        let layout = self.check_layout::<{ Sqe::SIZE }>(env, sqe, shape)?;
        let (qid, cqid, state) = (command.qid, command.cqid, QueueState::Creating);
        self.sqs.insert(qid, SqRecord { layout, cqid, worker, state });
        let latch =
            cx.latch(ended_notice(env.generation, Operation::CreateSq { qid, cid: sqe.cid }));
        let controller = cx.shared.id;
        cx.send(worker, Message::CreateSq { controller, layout, cqid, latch });
        Ok(Outcome::Pending)
    }

    /// Completes Create I/O Submission Queue after the I/O thread has created the queue or failed.
    pub(super) fn sq_created(
        &mut self,
        cx: &Context,
        port: &mut AdminPort,
        (qid, cid): (u16, u16),
        status: Status,
        deferred: &mut Deferred,
    ) {
        let live = self.sqs.len();
        let Some(sq) = self.sqs.get_mut(&qid) else { return };
        if !status.is_success() {
            self.sqs.remove(&qid);
            return port.fail(cid, status, 0);
        }
        sq.state = QueueState::Live;
        cx.trace(Kind::QueueCreated, qid, sq.layout.size.entries(), sq.cqid.into());
        cx.shared.set_owner(qid, DoorbellKind::Sq, Some(cx.route.resolve(sq.worker)));
        deferred.event(Event::QueueCreated(live));
        port.complete(cid, Status::SUCCESS, 0);
    }

    pub(super) fn delete_sq(
        &mut self,
        cx: &Context,
        generation: u64,
        sqe: &Sqe,
        deferred: &mut Deferred,
    ) -> Executed {
        let qid = DeleteIoQueue::decode(sqe).qid;
        let record = self.sqs.get_mut(&qid).filter(|sq| sq.state == QueueState::Live);
        let Some(record) = record else { return Err(Status::INVALID_QID.with_dnr()) };
        record.state = QueueState::Deleting;
        cx.shared.set_owner(qid, DoorbellKind::Sq, None);
        let notice = ended_notice(generation, Operation::DeleteSq { qid, cid: sqe.cid });
        let message = |controller, latch| Message::DeleteSq { controller, qid, latch };
        Ok(delete(cx, record.worker, notice, message, deferred))
    }

    /// Completes Delete I/O Submission Queue when none of its commands is in flight.
    pub(super) fn sq_deleted(
        &mut self,
        cx: &Context,
        port: &mut AdminPort,
        (qid, cid): (u16, u16),
    ) {
        self.sqs.remove(&qid);
        cx.trace(Kind::QueueDeleted, qid, 0, 0);
        clear_register(cx, qid, DoorbellKind::Sq);
        port.complete(cid, Status::SUCCESS, 0);
    }

    pub(super) fn delete_cq(
        &mut self,
        cx: &Context,
        generation: u64,
        sqe: &Sqe,
        deferred: &mut Deferred,
    ) -> Executed {
        let qid = DeleteIoQueue::decode(sqe).qid;
        let in_use = self.sqs.values().any(|sq| sq.cqid == qid);
        let record = self.cqs.get_mut(&qid).filter(|cq| cq.state == QueueState::Live);
        let Some(record) = record else { return Err(Status::INVALID_QID.with_dnr()) };
        if in_use {
            return Err(Status::INVALID_QUEUE_DELETION.with_dnr());
        }
        record.state = QueueState::Deleting;
        cx.shared.set_owner(qid, DoorbellKind::Cq, None);
        let notice = ended_notice(generation, Operation::DeleteCq { qid, cid: sqe.cid });
        let message = |controller, latch| Message::DeleteCq { controller, qid, latch };
        Ok(delete(cx, record.worker, notice, message, deferred))
    }

    /// Completes Delete I/O Completion Queue.
    pub(super) fn cq_deleted(
        &mut self,
        cx: &Context,
        port: &mut AdminPort,
        (qid, cid): (u16, u16),
    ) {
        if let Some(record) = self.cqs.remove(&qid) {
            cx.pool.unassign_queue(record.worker);
        }
        cx.trace(Kind::QueueDeleted, qid | COMPLETION_QUEUE, 0, 0);
        clear_register(cx, qid, DoorbellKind::Cq);
        port.complete(cid, Status::SUCCESS, 0);
    }
}

/// Sends `message` to delete a queue. The I/O thread sends `notice` when no command of the queue is
/// in flight.
fn delete(
    cx: &Context,
    worker: usize,
    notice: Notice,
    message: impl FnOnce(u32, Latch) -> Message,
    deferred: &mut Deferred,
) -> Outcome {
    let latch = cx.latch(notice);
    cx.send(worker, message(cx.shared.id, latch.clone()));
    deferred.latches.push(latch);
    Outcome::Pending
}

/// Clears a doorbell register, because the next queue with this identifier starts at 0.
fn clear_register(cx: &Context, qid: u16, kind: DoorbellKind) {
    shadowbell_doorbell::Cell::store_release(&cx.shared.register(qid, kind), 0);
}

/// Transfer between processes: checkpoint, restore and recovery.
impl IoQueues {
    /// Layout of the queues for the checkpoint of a running controller. Queue positions are in the
    /// journal instead.
    ///
    /// # Errors
    /// The error of the system if no more file descriptors are available.
    pub(super) fn record(&self, fds: &mut Descriptors) -> io::Result<Vec<SavedPart>> {
        let head = SavedDoorbell { last: 0, truth: SavedTruth::Register, snapshot: None };
        let place = |layout: &QueueLayout| (layout.qid, layout.iova, layout.size.entries());
        let mut parts = Vec::with_capacity(self.workers.len());
        for worker in self.workers() {
            let cqs = self.cqs.values().filter(|cq| cq.worker == worker && cq.exists());
            let sqs = self.sqs.values().filter(|sq| sq.worker == worker && sq.exists());
            let mut doorbell_eventfds = Vec::new();
            if let Some(event) = self.doorbell_eventfds.get(&worker) {
                doorbell_eventfds.push(fds.add(event.as_fd().try_clone_to_owned()?));
            }
            parts.push(SavedPart {
                worker,
                sqs: sqs
                    .map(|sq| {
                        let (qid, iova, entries) = place(&sq.layout);
                        SavedSq { qid, iova, entries, cqid: sq.cqid, head: 0, tail: head }
                    })
                    .collect(),
                cqs: cqs
                    .map(|cq| {
                        let ((qid, iova, entries), vector) = (place(&cq.layout), cq.vector);
                        let (tail, phase, staged) = (0, true, Vec::new());
                        SavedCq { qid, iova, entries, vector, tail, phase, head, staged }
                    })
                    .collect(),
                doorbell_eventfds,
            });
        }
        Ok(parts)
    }

    /// Restores queues of a quiesced controller.
    ///
    /// # Errors
    /// [`RestoreError`] if a queue is invalid.
    pub(super) fn restore(
        &mut self,
        cx: &Context,
        granted: (u16, u16),
        parts: &[SavedPart],
        eventfds: Vec<Vec<EventFd>>,
        restoring: &Restoring<'_>,
    ) -> Result<(), RestoreError> {
        self.granted = granted;
        let mut stopovers = Vec::with_capacity(parts.len());
        for (part, eventfds) in parts.iter().zip(eventfds) {
            let worker = self.adopt(cx, part, &eventfds)?;
            let serving = cx.route.resolve(worker);
            let queues = Relocated::restore(part, eventfds, restoring, serving)?;
            let queues = queues.ok_or(RestoreError::Invalid("an I/O queue"))?;
            stopovers.push(stopover(cx, serving, queues)?);
        }
        self.route_doorbells(cx);
        cx.route.begin_quiesced(stopovers);
        Ok(())
    }

    /// Recovers queues of a dead process. The queues are served when the quiesce ends. Returns the
    /// number of commands to replay.
    ///
    /// # Errors
    /// [`RestoreError`] if a queue is invalid.
    pub(super) fn recover(
        &mut self,
        cx: &Context,
        granted: (u16, u16),
        parts: &[SavedPart],
        eventfds: Vec<Vec<EventFd>>,
        restoring: &Restoring<'_>,
        journal: &mut RecoveredJournal,
    ) -> Result<usize, RestoreError> {
        self.granted = granted;
        let (mut stopovers, mut replays) = (Vec::with_capacity(parts.len()), 0);
        let mut of_worker: BTreeMap<usize, usize> = BTreeMap::new();
        for (part, eventfds) in parts.iter().zip(eventfds) {
            let worker = self.adopt(cx, part, &eventfds)?;
            let serving = cx.route.resolve(worker);
            let others = of_worker.entry(serving).or_default();
            let place = (serving, *others);
            let queues = Relocated::recover(part, eventfds, restoring, journal, place)?;
            let queues = queues.ok_or(RestoreError::Invalid("an I/O queue"))?;
            *others += queues.replays();
            replays += queues.replays();
            stopovers.push(stopover(cx, serving, queues)?);
        }
        self.route_doorbells(cx);
        cx.route.begin_quiesced(stopovers);
        Ok(replays)
    }

    /// Adds the queues in `part`, which another process has saved. Returns the I/O thread that will
    /// serve them.
    fn adopt(
        &mut self,
        cx: &Context,
        part: &SavedPart,
        eventfds: &[EventFd],
    ) -> Result<usize, RestoreError> {
        let invalid = || RestoreError::Invalid("an I/O queue");
        let state = QueueState::Live;
        let worker = Some(part.worker).filter(|worker| *worker < cx.pool.len());
        let worker = worker.unwrap_or_else(|| cx.pool.least_loaded());
        self.workers.insert(worker);
        if let Some(event) = eventfds.first() {
            self.doorbell_eventfds.insert(worker, event.try_clone()?);
        }
        for cq in &part.cqs {
            let layout = QueueLayout::restore(cq.qid, cq.iova, cq.entries);
            let layout = layout.filter(|layout| layout.qid != 0).ok_or_else(invalid)?;
            let vector = cq.vector;
            let record = CqRecord { layout, vector, worker, state };
            if self.cqs.insert(cq.qid, record).is_some() {
                return Err(invalid());
            }
        }
        for sq in &part.sqs {
            let layout = QueueLayout::restore(sq.qid, sq.iova, sq.entries);
            let layout = layout.filter(|layout| layout.qid != 0).ok_or_else(invalid)?;
            let cqid = sq.cqid;
            let record = SqRecord { layout, cqid, worker, state };
            if self.sqs.insert(sq.qid, record).is_some() {
                return Err(invalid());
            }
        }
        Ok(worker)
    }

    /// Routes the doorbells of all queues to their I/O threads.
    fn route_doorbells(&self, cx: &Context) {
        for (qid, cq) in &self.cqs {
            cx.pool.assign_queue_to(cq.worker);
            cx.shared.set_owner(*qid, DoorbellKind::Cq, Some(cx.route.resolve(cq.worker)));
        }
        for (qid, sq) in &self.sqs {
            cx.shared.set_owner(*qid, DoorbellKind::Sq, Some(cx.route.resolve(sq.worker)));
        }
    }
}

/// Holds queues for I/O thread `worker` until the quiesce ends.
fn stopover(cx: &Context, worker: usize, queues: Relocated) -> Result<Arc<Stopover>, RestoreError> {
    let home = cx.pool.destination(worker).ok_or(RestoreError::Invalid("a worker"))?;
    Ok(Stopover::with_queues(home, queues))
}
