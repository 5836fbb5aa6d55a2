//! Handling of notices from I/O threads.

use super::Control;
use super::control_override::Response;
use super::deferred::Deferred;
use super::reset::ShutdownFlush;
use crate::context::Context;
use crate::event::Event;
use crate::notice::{MissedErrors, Notice, Operation};
use crate::trace::Kind;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::regs;
use shadowbell_spec::status::Status;

impl Control {
    /// Handles errors whose notices were discarded.
    pub(crate) fn receive_missed(
        &mut self,
        cx: &Context,
        missed: &MissedErrors,
        deferred: &mut Deferred,
    ) {
        self.port.errors.skip(missed.count);
        let full = missed.full.iter().map(|nsid| (*nsid, Status::CAPACITY_EXCEEDED));
        for failed in full.chain(missed.write_fault) {
            self.commands.command_failed(cx, failed, deferred);
        }
    }

    /// Handles a notice from an I/O thread.
    pub(crate) fn receive(&mut self, cx: &Context, notice: Notice, deferred: &mut Deferred) {
        match notice {
            Notice::InvalidDoorbell { qid } => {
                tracing::debug!(qid, "invalid doorbell value");
                if self.is_ready() {
                    self.port.doorbell_error(AsyncEvent::INVALID_DOORBELL_VALUE);
                }
            }
            Notice::CommandError { sqid, cid, status, nsid, lba } => {
                self.port.log_error(sqid, cid, status, nsid, lba);
                let failed = (nsid, status);
                self.commands.command_failed(cx, failed, deferred);
            }
            Notice::MemoryLost => {
                let why = "host memory was truncated while it was mapped";
                self.fail(cx, why, deferred);
            }
            Notice::Condition(condition) => {
                let ready = self.is_ready();
                let response = self.overriding.as_mut().map(|o| o.condition(condition, ready));
                match response.unwrap_or(Response::Nothing) {
                    Response::Nothing => {}
                    Response::Fail(why) => self.fail(cx, why, deferred),
                    Response::Reset => self.begin_reset(cx, true, deferred),
                }
            }
            // A reset drops the commands that wait.
            Notice::WantsExclusive if self.is_ready() => self.exclusive.want(),
            Notice::WantsExclusive => {}
            Notice::AdminDoorbell => {}
            Notice::SlowTurns { took } => self.too_slow(cx, took, deferred),
            Notice::Relocated { from } => cx.route.arrived(&cx.pool, from),
            Notice::Left => self.queues_left(cx, deferred),
            Notice::Stranded => {
                self.fail(cx, "the dedicated I/O thread could not take over the queues", deferred);
            }
            Notice::NamespaceChanged { nsid, status } => {
                self.namespace_changed(cx, nsid, status, deferred);
            }
            Notice::PoolEnded { generation, cid, status, dw0 } => {
                self.pool_ended(cx, (generation, cid), (status, dw0), deferred);
            }
            Notice::Sanitized => self.sanitized(cx, deferred),
            Notice::Shared => self.pass_on_changes(cx, deferred),
            Notice::ReservationEnded { ticket, status } => {
                self.end_reservation(cx, ticket, status);
            }
            Notice::AnaChanged { ticket } => self.ana_changed(ticket, deferred),
            Notice::MemoryReleased { ticket } => {
                deferred.callbacks.extend(self.memory.released(ticket));
            }
            // Operations from before a reset are ignored.
            Notice::Ended { generation, .. } if generation != self.lifecycle.generation => {}
            Notice::Ended { operation, status, .. } => {
                self.operation_ended(cx, operation, status, deferred);
            }
        }
    }

    /// Continues `operation` after all I/O threads have finished their part.
    pub(super) fn operation_ended(
        &mut self,
        cx: &Context,
        operation: Operation,
        status: Status,
        deferred: &mut Deferred,
    ) {
        let (queues, port) = (&mut self.queues, &mut self.port);
        match operation {
            Operation::CreateCq { qid, cid } => queues.cq_created(cx, port, (qid, cid), status),
            Operation::CreateSq { qid, cid } => {
                queues.sq_created(cx, port, (qid, cid), status, deferred);
            }
            Operation::DeleteCq { qid, cid } => queues.cq_deleted(cx, port, (qid, cid)),
            Operation::DeleteSq { qid, cid } => queues.sq_deleted(cx, port, (qid, cid)),
            Operation::ShadowDoorbells { cid } => {
                self.commands.shadow_configured(port, cid);
                cx.trace(Kind::ShadowConfigured, 0, 0, 0);
                deferred.event(Event::ShadowDoorbells);
            }
            Operation::Abort { cid } => self.commands.abort_ended(port, cid, status),
            Operation::LbaStatus { cid } => self.commands.lba_status_ended(cx, port, cid),
            // The cache is already off, so only writes from before had to be flushed.
            Operation::Flush { cid } | Operation::Feature { cid } if status.is_success() => {
                port.complete(cid, status, 0);
            }
            Operation::Flush { cid } | Operation::Feature { cid } => port.fail(cid, status, 0),
            Operation::Pause | Operation::Exclusive => self.next_exclusive(cx, deferred),
            Operation::Recorded => self.exclusive_recorded(cx, deferred),
            Operation::Settled => self.exclusive_settled(cx),
            Operation::SelfTest { run, nsid } => self.verified(cx, (run, nsid), status),
            Operation::Shutdown => {
                let flush = std::mem::replace(&mut self.lifecycle.flush, ShutdownFlush::None);
                match flush {
                    ShutdownFlush::None => {}
                    ShutdownFlush::Again => self.shut_down(cx, deferred),
                    ShutdownFlush::UnderWay if self.memory.shadow.is_some() => {
                        self.end_shadow_doorbells(cx, deferred);
                    }
                    ShutdownFlush::UnderWay => {
                        self.let_workers_go(cx, deferred);
                        self.registers.csts.set_shst(regs::SHST_COMPLETE);
                        deferred.event(Event::Shutdown);
                    }
                }
            }
            Operation::Reset => self.end_reset(cx, deferred),
        }
    }
}
