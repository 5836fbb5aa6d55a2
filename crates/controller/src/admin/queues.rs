//! Creating and deleting I/O queues.

use super::{Executed, Outcome};
use crate::control::{Control, CqRecord, Deferred, QueueState, SqRecord};
use crate::controller::{Event, Inner};
use crate::trace::{COMPLETION_QUEUE, Kind};
use crate::worker::message::{Message, Reply, Seed};
use crate::worker::queue::Placement;
use shadowbell_doorbell::RingSize;
use shadowbell_memory::Ring;
use shadowbell_spec::admin::{CreateIoCq, CreateIoSq, DeleteIoQueue};
use shadowbell_spec::regs::DoorbellKind;
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use std::sync::Arc;

impl Control {
    /// Checks what both kinds of queue have in common.
    fn place<const ENTRY: usize>(
        &self,
        sqe: &Sqe,
        (qid, qsize0, contiguous): (u16, u16, bool),
    ) -> Result<Placement, Status> {
        let granted = if ENTRY == Cqe::SIZE { self.granted.1 } else { self.granted.0 };
        if qid == 0 || qid > granted {
            return Err(Status::INVALID_QID.with_dnr());
        }
        let size = RingSize::from_zero_based(qsize0).filter(|_| qsize0 <= self.cap.mqes());
        let Some(size) = size else { return Err(Status::INVALID_QUEUE_SIZE.with_dnr()) };
        // CAP.CQR: queues have to be contiguous.
        if !contiguous {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let iova = sqe.prp1();
        if !iova.is_multiple_of(self.page_size() as u64) {
            return Err(Status::PRP_OFFSET_INVALID.with_dnr());
        }
        let write = ENTRY == Cqe::SIZE;
        let entries = size.entries();
        Ring::<ENTRY>::resolve(self.space.table(), iova, entries, write).map_err(|fault| {
            tracing::warn!(qid, %fault, "a queue's memory can not be reached");
            Status::INVALID_FIELD.with_dnr()
        })?;
        Ok(Placement { qid, iova, size })
    }

    pub(super) fn create_cq(&mut self, inner: &Inner, sqe: &Sqe) -> Executed {
        let command = CreateIoCq::decode(sqe);
        if self.cqs.contains_key(&command.qid) {
            return Err(Status::INVALID_QID.with_dnr());
        }
        // CC.IOCQES says how large an entry is, as a power of two.
        if 1usize << self.regs.cc.iocqes() != Cqe::SIZE {
            return Err(Status::INVALID_QUEUE_SIZE.with_dnr());
        }
        let shape = (command.qid, command.qsize0, command.pc);
        let place = self.place::<{ Cqe::SIZE }>(sqe, shape)?;
        if command.ien && usize::from(command.iv) >= inner.shared.irqs.len() {
            return Err(Status::INVALID_INTERRUPT_VECTOR.with_dnr());
        }
        let vector = command.ien.then_some(command.iv);
        let worker = inner.pool.place();
        let state = QueueState::Creating;
        self.cqs.insert(command.qid, CqRecord { place, vector, worker, state });
        self.tenancies.insert(worker);
        let seed = Box::new(Seed {
            shared: Arc::clone(&inner.shared),
            table: Arc::clone(self.space.table()),
            namespaces: Arc::clone(&inner.namespaces),
            page_size: self.page_size(),
            max_transfer: 4096usize << inner.config.mdts,
            shadow: self.shadow,
        });
        let (qid, cid, generation) = (command.qid, sqe.cid, self.generation);
        let me = inner.me.clone();
        let reply: Reply = Box::new(move |outcome| {
            let Some(inner) = me.upgrade() else { return };
            let mut control = inner.lock();
            if control.generation != generation {
                return;
            }
            match outcome {
                Ok(()) => {
                    if let Some(cq) = control.cqs.get_mut(&qid) {
                        cq.state = QueueState::Live;
                        let vector = cq.vector.map_or(u32::MAX, u32::from);
                        let (id, size) = (qid | COMPLETION_QUEUE, cq.place.size.entries());
                        inner.note(Kind::QueueCreated, id, size, vector);
                    }
                    inner.shared.set_owner(qid, DoorbellKind::Cq, Some(worker));
                    control.complete(&inner, cid, Status::SUCCESS, 0);
                }
                Err(status) => {
                    control.cqs.remove(&qid);
                    inner.pool.unplace(worker);
                    control.log_error(0, cid, status, 0, 0);
                    control.complete(&inner, cid, status, 0);
                }
            }
        });
        inner.pool.send(worker, Message::CreateCq { seed, place, vector, reply });
        Ok(Outcome::Later)
    }

    pub(super) fn create_sq(&mut self, inner: &Inner, sqe: &Sqe) -> Executed {
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
        if 1usize << self.regs.cc.iosqes() != Sqe::SIZE {
            return Err(Status::INVALID_QUEUE_SIZE.with_dnr());
        }
        let shape = (command.qid, command.qsize0, command.pc);
        let place = self.place::<{ Sqe::SIZE }>(sqe, shape)?;
        let (qid, cqid, state) = (command.qid, command.cqid, QueueState::Creating);
        self.sqs.insert(qid, SqRecord { place, cqid, worker, state });
        let (cid, generation, me) = (sqe.cid, self.generation, inner.me.clone());
        let reply: Reply = Box::new(move |outcome| {
            let Some(inner) = me.upgrade() else { return };
            let mut deferred = Deferred::default();
            {
                let mut control = inner.lock();
                if control.generation != generation {
                    return;
                }
                match outcome {
                    Ok(()) => {
                        if let Some(sq) = control.sqs.get_mut(&qid) {
                            sq.state = QueueState::Live;
                            let size = sq.place.size.entries();
                            inner.note(Kind::QueueCreated, qid, size, cqid.into());
                        }
                        inner.shared.set_owner(qid, DoorbellKind::Sq, Some(worker));
                        let live = control.sqs.len();
                        deferred.event(Event::QueueCreated(live));
                        control.complete(&inner, cid, Status::SUCCESS, 0);
                    }
                    Err(status) => {
                        control.sqs.remove(&qid);
                        control.log_error(0, cid, status, 0, 0);
                        control.complete(&inner, cid, status, 0);
                    }
                }
            }
            inner.run(deferred);
        });
        let controller = inner.shared.id;
        inner.pool.send(worker, Message::CreateSq { controller, place, cqid, reply });
        Ok(Outcome::Later)
    }

    pub(super) fn delete_sq(
        &mut self,
        inner: &Inner,
        sqe: &Sqe,
        deferred: &mut Deferred,
    ) -> Executed {
        let qid = DeleteIoQueue::decode(sqe).qid;
        let record = self.sqs.get_mut(&qid).filter(|sq| sq.state == QueueState::Live);
        let Some(record) = record else { return Err(Status::INVALID_QID.with_dnr()) };
        record.state = QueueState::Deleting;
        let worker = record.worker;
        inner.shared.set_owner(qid, DoorbellKind::Sq, None);
        let (cid, generation) = (sqe.cid, self.generation);
        let latch = inner.latch(move |inner, control, _| {
            if control.generation == generation {
                control.sqs.remove(&qid);
                inner.note(Kind::QueueDeleted, qid, 0, 0);
                clear_register(inner, qid, DoorbellKind::Sq);
                control.complete(inner, cid, Status::SUCCESS, 0);
            }
        });
        let controller = inner.shared.id;
        inner.pool.send(worker, Message::DeleteSq { controller, qid, latch: latch.clone() });
        deferred.latches.push(latch);
        Ok(Outcome::Later)
    }

    pub(super) fn delete_cq(
        &mut self,
        inner: &Inner,
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
        let worker = record.worker;
        inner.shared.set_owner(qid, DoorbellKind::Cq, None);
        let (cid, generation) = (sqe.cid, self.generation);
        let latch = inner.latch(move |inner, control, _| {
            if control.generation == generation {
                control.cqs.remove(&qid);
                inner.note(Kind::QueueDeleted, qid | COMPLETION_QUEUE, 0, 0);
                inner.pool.unplace(worker);
                clear_register(inner, qid, DoorbellKind::Cq);
                control.complete(inner, cid, Status::SUCCESS, 0);
            }
        });
        let controller = inner.shared.id;
        inner.pool.send(worker, Message::DeleteCq { controller, qid, latch: latch.clone() });
        deferred.latches.push(latch);
        Ok(Outcome::Later)
    }
}

/// The next queue of this identifier starts at 0.
fn clear_register(inner: &Inner, qid: u16, kind: DoorbellKind) {
    shadowbell_doorbell::Cell::store_release(&inner.shared.register(qid, kind), 0);
}
