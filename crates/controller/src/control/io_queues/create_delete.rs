//! Create and Delete I/O Submission and Completion Queue: checks, and completion after the I/O
//! thread has finished.

use super::{CqRecord, IoQueues, QueueEnvironment, QueueState, SqRecord, ended};
use crate::context::Context;
use crate::control::admin::{AdminPort, Executed, Outcome};
use crate::control::deferred::Deferred;
use crate::event::Event;
use crate::notice::{Latch, Notice, Operation};
use crate::queue::QueueLayout;
use crate::trace::{COMPLETION_QUEUE, Kind};
use crate::worker::mailbox::Message;
use crate::worker::queue_set::QueueOverride;
use shadowbell_doorbell::RingSize;
use shadowbell_memory::Ring;
use shadowbell_spec::admin::{CreateIoCq, CreateIoSq, DeleteIoQueue};
use shadowbell_spec::regs::DoorbellKind;
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};

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

    pub(in crate::control) fn create_cq(
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

    /// Completes Create I/O Completion Queue after the I/O thread has created the queue or failed.
    pub(in crate::control) fn cq_created(
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

    pub(in crate::control) fn create_sq(
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

    /// Completes Create I/O Submission Queue after the I/O thread has created the queue or failed.
    pub(in crate::control) fn sq_created(
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

    pub(in crate::control) fn delete_sq(
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

    /// Completes Delete I/O Submission Queue when none of its commands is in flight.
    pub(in crate::control) fn sq_deleted(
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

    pub(in crate::control) fn delete_cq(
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

    /// Completes Delete I/O Completion Queue.
    pub(in crate::control) fn cq_deleted(
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
}

/// Sends `message` to delete a queue; `notice` is sent when none of its commands is in flight.
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

/// Clears a doorbell register, so that the next queue with this identifier starts at 0.
fn clear_register(cx: &Context, qid: u16, kind: DoorbellKind) {
    shadowbell_doorbell::Cell::store_release(&cx.shared.register(qid, kind), 0);
}
