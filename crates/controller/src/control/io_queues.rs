//! The I/O queues that exist: creating, deleting, and who serves them.

use super::admin::{AdminPort, Executed, Outcome};
use super::deferred::Deferred;
use super::memory::HostMemory;
use super::registers::Registers;
use crate::admin::self_test::Piece;
use crate::context::Context;
use crate::event::Event;
use crate::journal::RecoveredJournal;
use crate::latch::Latch;
use crate::notice::{Notice, Operation};
use crate::queue::QueueLayout;
use crate::saved::{SavedCq, SavedDoorbell, SavedPart, SavedSq, SavedTruth};
use crate::shared::DSTRD;
use crate::successor::RestoreError;
use crate::trace::{COMPLETION_QUEUE, Kind};
use crate::worker::message::{Message, QueueContext};
use crate::worker::queue_override::QueueOverride;
use crate::worker::relocation::{Relocated, Restoring, Stopover};
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

/// Which descriptors stand for which doorbells.
///
/// A host whose doorbell values are in its shadow doorbell buffer rings only to wake a sleeper: the
/// value that it writes is of no use to anybody. So an eventfd does as well, and goes to the worker
/// without a message to whoever carries the controller, and without that one's thread.
///
/// Each controller has its own for each worker, because who holds an eventfd can also read it, and
/// so take the wakeups of others who would share it.
#[derive(Debug, Default)]
pub struct DoorbellEventfds {
    /// The descriptors; signal one to have doorbells looked at.
    pub events: Vec<EventFd>,
    /// Doorbells by their offset in BAR0, and the index of the descriptor that stands for each.
    pub doorbells: Vec<(u64, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueState {
    Creating,
    Live,
    Deleting,
}

/// A submission queue that exists.
#[derive(Clone, Copy, Debug)]
struct SqRecord {
    layout: QueueLayout,
    cqid: u16,
    worker: usize,
    state: QueueState,
}

/// A completion queue that exists.
#[derive(Clone, Copy, Debug)]
struct CqRecord {
    layout: QueueLayout,
    vector: Option<u16>,
    worker: usize,
    state: QueueState,
}

impl SqRecord {
    /// Whether the host has been told that it exists, and not that it does not any more.
    fn exists(&self) -> bool {
        self.state != QueueState::Creating
    }
}

impl CqRecord {
    /// As [`SqRecord::exists`].
    fn exists(&self) -> bool {
        self.state != QueueState::Creating
    }
}

/// What creating a queue depends on beside the command.
pub(super) struct QueueEnvironment<'a> {
    pub(super) registers: &'a Registers,
    pub(super) memory: &'a HostMemory,
    /// Resets that there have been.
    pub(super) generation: u64,
}

impl QueueEnvironment<'_> {
    /// What a worker needs to know of the controller.
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

/// The I/O queues that exist.
pub(super) struct IoQueues {
    sqs: BTreeMap<u16, SqRecord>,
    cqs: BTreeMap<u16, CqRecord>,
    /// Submission and completion queues that the host may create (feature 07h).
    granted: (u16, u16),
    /// Workers that have had queues of this controller since the last reset.
    workers: BTreeSet<usize>,
    /// By worker, the descriptor that has it look at the doorbells.
    doorbell_eventfds: BTreeMap<usize, EventFd>,
}

impl IoQueues {
    /// None yet, and at most so many of each kind.
    pub(super) fn new(io_queues: u16) -> Self {
        Self {
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            granted: (io_queues, io_queues),
            workers: BTreeSet::new(),
            doorbell_eventfds: BTreeMap::new(),
        }
    }

    /// The workers that serve these queues.
    pub(super) fn workers(&self) -> impl Iterator<Item = usize> {
        self.workers.iter().copied()
    }

    /// None of them has anything of the controller any more.
    pub(super) fn forget_workers(&mut self) {
        self.workers.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sqs.is_empty() && self.cqs.is_empty()
    }

    /// Whether there is any submission queue.
    pub(super) fn has_sqs(&self) -> bool {
        !self.sqs.is_empty()
    }

    /// Whether none is being created or deleted.
    pub(super) fn is_quiet(&self) -> bool {
        self.sqs.values().all(|sq| sq.state == QueueState::Live)
            && self.cqs.values().all(|cq| cq.state == QueueState::Live)
    }

    /// Submission and completion queues that the host may create.
    pub(super) fn granted(&self) -> (u16, u16) {
        self.granted
    }

    /// What there is, for the record of a controller at work. How far the queues are is in the
    /// journal.
    ///
    /// # Errors
    /// The system's, when it has no more descriptors.
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

    /// Goes on with queues that were served elsewhere.
    ///
    /// # Errors
    /// A queue that can not be.
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
        self.own(cx);
        cx.route.begin_rest_with(stopovers);
        Ok(())
    }

    /// Goes on with queues of a process that is dead, when the controller's rest ends. How many
    /// commands were under way.
    ///
    /// # Errors
    /// A queue that can not be.
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
        self.own(cx);
        cx.route.begin_rest_with(stopovers);
        Ok(replays)
    }

    /// Takes note of queues that were served elsewhere: the worker that they are placed at.
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

    /// Where the completion queues are, and how many entries each has.
    pub(super) fn completion_queues(&self) -> impl Iterator<Item = (u64, u32)> {
        self.cqs.values().map(|cq| (cq.layout.iova, cq.layout.size.entries()))
    }

    /// Doorbells of all queues go to their workers.
    fn own(&self, cx: &Context) {
        for (qid, cq) in &self.cqs {
            cx.pool.place_at(cq.worker);
            cx.shared.set_owner(*qid, DoorbellKind::Cq, Some(cx.route.resolve(cq.worker)));
        }
        for (qid, sq) in &self.sqs {
            cx.shared.set_owner(*qid, DoorbellKind::Sq, Some(cx.route.resolve(sq.worker)));
        }
    }

    /// Feature 07h, Number of Queues, was set.
    pub(super) fn grant(&mut self, submission: u16, completion: u16) {
        self.granted = (submission, completion);
    }

    /// The worker that serves submission queue `sqid`.
    pub(super) fn worker_of(&self, sqid: u16) -> Option<usize> {
        self.sqs.get(&sqid).map(|sq| sq.worker)
    }

    /// Checks what both kinds of queue have in common.
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
            tracing::warn!(qid, %fault, "a queue's memory can not be reached");
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
        // CC.IOCQES says how large an entry is, as a power of two.
        if 1usize << env.registers.cc.iocqes() != Cqe::SIZE {
            return Err(Status::INVALID_QUEUE_SIZE.with_dnr());
        }
        let shape = (command.qid, command.qsize0, command.pc);
        let layout = self.check_layout::<{ Cqe::SIZE }>(env, sqe, shape)?;
        if command.ien && usize::from(command.iv) >= cx.shared.irqs.len() {
            return Err(Status::INVALID_INTERRUPT_VECTOR.with_dnr());
        }
        let vector = command.ien.then_some(command.iv);
        let worker = cx.pool.place();
        let state = QueueState::Creating;
        self.cqs.insert(command.qid, CqRecord { layout, vector, worker, state });
        self.workers.insert(worker);
        let context = env.context(cx, overriding);
        let operation = Operation::CreateCq { qid: command.qid, cid: sqe.cid };
        let latch = cx.latch(ended(env.generation, operation));
        cx.send(worker, Message::CreateCq { context, layout, vector, latch });
        Ok(Outcome::Later)
    }

    /// Has every namespace flushed, by a worker, whether there are queues or not: what was written
    /// through queues that are gone counts as well. The controller has to be enabled. The end of
    /// `operation` is its end.
    pub(super) fn flush(
        &mut self,
        cx: &Context,
        env: &QueueEnvironment<'_>,
        operation: Operation,
        overriding: Option<Box<dyn QueueOverride>>,
    ) {
        let worker = self.workers().next().unwrap_or_else(|| cx.pool.least_loaded());
        self.workers.insert(worker);
        let latch = cx.latch(ended(env.generation, operation));
        let context = env.context(cx, overriding);
        cx.send(worker, Message::Flush { context, latch });
    }

    /// Has a piece of a namespace verified, by a worker, as with [`flush`](Self::flush).
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
        let latch = cx.latch(ended(env.generation, operation));
        let context = env.context(cx, overriding);
        cx.send(worker, Message::Verify { context, piece, latch });
    }

    /// The worker has created a completion queue, or failed to.
    pub(super) fn cq_created(
        &mut self,
        cx: &Context,
        port: &mut AdminPort,
        (qid, cid): (u16, u16),
        status: Status,
    ) {
        let Some(cq) = self.cqs.get_mut(&qid) else { return };
        if !status.is_success() {
            cx.pool.unplace(cq.worker);
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
        let latch = cx.latch(ended(env.generation, Operation::CreateSq { qid, cid: sqe.cid }));
        let controller = cx.shared.id;
        cx.send(worker, Message::CreateSq { controller, layout, cqid, latch });
        Ok(Outcome::Later)
    }

    /// The worker has created a submission queue, or failed to.
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
        let notice = ended(generation, Operation::DeleteSq { qid, cid: sqe.cid });
        let message = |controller, latch| Message::DeleteSq { controller, qid, latch };
        Ok(delete(cx, record.worker, notice, message, deferred))
    }

    /// Nothing of a submission queue is in flight any more.
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
        let notice = ended(generation, Operation::DeleteCq { qid, cid: sqe.cid });
        let message = |controller, latch| Message::DeleteCq { controller, qid, latch };
        Ok(delete(cx, record.worker, notice, message, deferred))
    }

    /// A completion queue is gone.
    pub(super) fn cq_deleted(
        &mut self,
        cx: &Context,
        port: &mut AdminPort,
        (qid, cid): (u16, u16),
    ) {
        if let Some(record) = self.cqs.remove(&qid) {
            cx.pool.unplace(record.worker);
        }
        cx.trace(Kind::QueueDeleted, qid | COMPLETION_QUEUE, 0, 0);
        clear_register(cx, qid, DoorbellKind::Cq);
        port.complete(cid, Status::SUCCESS, 0);
    }

    /// A reset begins: the doorbells stand for nothing any more.
    pub(super) fn drop_eventfds(&mut self) {
        self.doorbell_eventfds.clear();
    }

    /// A reset is over: all queues are gone.
    pub(super) fn reset(&mut self, cx: &Context) {
        for qid in std::mem::take(&mut self.sqs).into_keys() {
            cx.shared.set_owner(qid, DoorbellKind::Sq, None);
        }
        for (qid, record) in std::mem::take(&mut self.cqs) {
            cx.shared.set_owner(qid, DoorbellKind::Cq, None);
            cx.pool.unplace(record.worker);
        }
        self.workers.clear();
        self.granted = (cx.config.io_queues, cx.config.io_queues);
    }

    /// Descriptors that stand for the doorbells of the live queues.
    ///
    /// # Errors
    /// The system's, when it has no more descriptors.
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

    /// The descriptor that has `worker` look at this controller's doorbells.
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

/// The notice of an operation's end, as it is until a worker says otherwise.
pub(super) fn ended(generation: u64, operation: Operation) -> Notice {
    Notice::Ended { generation, operation, status: Status::SUCCESS }
}

/// Has a worker delete a queue, by `message`; `notice` is given when nothing of it is in flight.
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
    Outcome::Later
}

/// The next queue of this identifier starts at 0.
fn clear_register(cx: &Context, qid: u16, kind: DoorbellKind) {
    shadowbell_doorbell::Cell::store_release(&cx.shared.register(qid, kind), 0);
}

/// Where queues stay that `worker` is to serve, until the controller's rest ends.
fn stopover(cx: &Context, worker: usize, queues: Relocated) -> Result<Arc<Stopover>, RestoreError> {
    let home = cx.pool.destination(worker).ok_or(RestoreError::Invalid("a worker"))?;
    Ok(Stopover::with_queues(home, queues))
}
