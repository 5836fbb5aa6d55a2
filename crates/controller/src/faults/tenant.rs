//! A tenant of a worker that serves its queues wrong: a path of its own, command by command.

use super::{BURST, Tenant, report_error};
use crate::faults::{Fault, Injector};
use crate::shared::Report;
use crate::trace::TraceRing;
use crate::worker::io::Ended;
use crate::worker::message::AbortReply;
use crate::worker::queue::{Cq, Sq};
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use std::time::Instant;

/// What is not done with yet.
#[derive(Default)]
pub(super) struct Parked {
    /// Completions that come late, with their completion queue's index and their queue's.
    delayed: Vec<(Instant, usize, Cqe)>,
    /// Commands that wait to be aborted: submission queue and command identifier. And until when, if
    /// not for ever.
    hung: Vec<(Option<Instant>, usize, u16)>,
    /// Commands that wait to be carried out, by submission queue.
    stalled: Vec<(Instant, usize, Sqe)>,
    /// Commands that a disk has in hand, and what will go wrong at their end.
    marked: Vec<(usize, u16, Fault)>,
}

impl Parked {
    pub(super) fn is_waiting(&self) -> bool {
        let hangs_for_a_time = self.hung.iter().any(|(until, ..)| until.is_some());
        hangs_for_a_time || !(self.delayed.is_empty() && self.stalled.is_empty())
    }

    pub(super) fn clear(&mut self) {
        self.delayed.clear();
        self.hung.clear();
        self.stalled.clear();
        self.marked.clear();
    }

    fn mark_of(&mut self, sq: usize, cid: u16) -> Option<Fault> {
        let at = self.marked.iter().position(|(s, c, _)| (*s, *c) == (sq, cid))?;
        Some(self.marked.swap_remove(at).2)
    }
}

/// The end of a command for which an entry is reserved, with what goes wrong.
fn finish(
    (index, sq): (usize, &mut Sq),
    cq: &mut Cq,
    parked: &mut Parked,
    injector: &Injector,
    mut cqe: Cqe,
    fault: Option<Fault>,
) {
    match fault {
        Some(Fault::DropAfter) => {
            cq.reserved = cq.reserved.saturating_sub(1);
            return;
        }
        Some(Fault::Delay(time)) => {
            parked.delayed.push((Instant::now() + time, index, cqe));
            sq.in_flight += 1;
            return;
        }
        Some(Fault::Duplicate) if cq.free() > 0 => {
            cq.reserved += 1;
            cq.complete(cqe);
        }
        Some(Fault::Corrupt) => {
            let noise = injector.noise();
            match noise % 5 {
                0 => cqe.dw0 ^= (noise >> 32) as u32,
                1 => cqe.dw1 ^= (noise >> 32) as u32,
                2 => cqe.sq_head ^= (noise >> 32) as u16 | 1,
                3 => cqe.sq_id ^= (noise >> 32) as u16 | 1,
                _ => cqe.status ^= ((noise >> 32) as u16 & 0x0fff | 1) << 1,
            }
        }
        // No host that counts its slots from 0 has so many.
        Some(Fault::WrongCid) => cqe.cid ^= 0x8000,
        Some(Fault::WrongHead) => cqe.sq_head = u16::MAX,
        Some(Fault::WrongSqId) => cqe.sq_id ^= 0x40,
        Some(Fault::WrongPhase) => {
            cq.post();
            if !cq.has_staged()
                && let Some(ring) = &cq.ring
            {
                let words: [u64; 2] = zerocopy::transmute!(cqe);
                let inverted = u64::from(!cq.phase) << 48;
                ring.publish_run(u32::from(cq.tail), &[words], inverted);
                cq.tail = cq.place.size.forward(cq.tail, 1);
                cq.phase ^= cq.tail == 0;
                cq.reserved = cq.reserved.saturating_sub(1);
                return;
            }
        }
        _ => {}
    }
    cq.complete(cqe);
}

impl Tenant {
    /// Fetches and carries out, and gets it wrong.
    pub(super) fn fetch_faulty(
        &mut self,
        index: usize,
        tail: u16,
        trace: &mut Option<TraceRing>,
        injector: &Injector,
    ) -> u32 {
        if self.shared.faults.is_dead() {
            return 0;
        }
        let Self { sqs, cqs, engine, shared, parked, .. } = self;
        let Some(sq) = sqs.get_mut(index).and_then(Option::as_mut) else { return 0 };
        let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) else { return 0 };
        if cq.ring.is_none() {
            return 0;
        }
        if cq.look().is_err() || cq.free() == 0 {
            // The host hears of a bad head when there are no faults.
            sq.blocked = true;
            return 0;
        }
        sq.blocked = false;
        engine.set_write_through(shared.is_write_through());
        let qid = sq.place.qid;
        let mut fetched = 0;
        while sq.head != tail && fetched < BURST && cq.free() > 0 && !shared.faults.is_dead() {
            let Some(sqe) = sq.fetch() else { break };
            fetched += 1;
            let fault = injector.command(qid);
            let success = Cqe::new(sqe.cid, qid, sq.head, Status::SUCCESS, 0);
            match fault {
                Some(Fault::DropBefore) => continue,
                Some(Fault::Hang(time)) => {
                    cq.reserved += 1;
                    sq.in_flight += 1;
                    parked.hung.push((time.map(|time| Instant::now() + time), index, sqe.cid));
                    continue;
                }
                Some(Fault::Stall(time)) => {
                    cq.reserved += 1;
                    sq.in_flight += 1;
                    parked.stalled.push((Instant::now() + time, index, sqe));
                    continue;
                }
                Some(Fault::Status(status)) => {
                    cq.reserved += 1;
                    cq.complete(success.with_status(status));
                    continue;
                }
                Some(fault @ (Fault::Fatal | Fault::SubsystemReset | Fault::Removal)) => {
                    // The command is not carried out: this came before it.
                    shared.report(Report::Fault(fault));
                    break;
                }
                _ => {}
            }
            cq.reserved += 1;
            match engine.start(&sqe, index) {
                Ok(true) => finish((index, sq), cq, parked, injector, success, fault),
                Ok(false) => {
                    sq.in_flight += 1;
                    parked.marked.extend(fault.map(|fault| (index, sqe.cid, fault)));
                }
                Err(status) => {
                    engine.count_error(status);
                    let (cid, nsid, lba) = (sqe.cid, sqe.nsid, sqe.cdw10_11());
                    let ended = Ended { sq: index, cid, status, nsid, lba, dw0: 0 };
                    report_error(shared, qid, &ended);
                    cq.complete(success.with_status(status));
                }
            }
        }
        sq.stats.batches += 1;
        sq.stats.largest_batch = sq.stats.largest_batch.max(fetched.into());
        if cq.has_staged() && cq.post() {
            cq.announce(&shared.coalescing);
        }
        let _ = trace;
        fetched
    }

    /// The same for commands that the disks have ended.
    pub(super) fn reap_faulty(&mut self, injector: &Injector) -> bool {
        let mut busy = false;
        let Self { engine, sqs, cqs, shared, parked, .. } = self;
        let more = engine.reap(|ended| {
            busy = true;
            let Some(sq) = sqs.get_mut(ended.sq).and_then(Option::as_mut) else { return };
            let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) else { return };
            let cqe = sq.end(&ended);
            if !cqe.status().is_success() {
                report_error(shared, sq.place.qid, &ended);
            }
            let fault = parked.mark_of(ended.sq, ended.cid);
            finish((ended.sq, sq), cq, parked, injector, cqe, fault);
        });
        busy | more
    }

    /// Completes what is due.
    pub(super) fn release_delayed(&mut self) {
        let Self { sqs, cqs, shared, parked, .. } = self;
        let now = Instant::now();
        parked.delayed.retain(|(due, index, cqe)| {
            let Some(sq) = sqs.get_mut(*index).and_then(Option::as_mut) else { return false };
            if now < *due && !sq.stopped {
                return true;
            }
            sq.in_flight = sq.in_flight.saturating_sub(1);
            if let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) {
                cq.complete(*cqe);
                if cq.post() {
                    cq.announce(&shared.coalescing);
                }
            }
            false
        });
        self.carry_out_stalled(now);
        self.end_hung(now);
    }

    /// Ends what has hung for as long as it was to, without having carried it out.
    fn end_hung(&mut self, now: Instant) {
        let Self { sqs, cqs, shared, parked, .. } = self;
        parked.hung.retain(|(until, index, cid)| {
            if until.is_none_or(|until| now < until) {
                return true;
            }
            if let Some(sq) = sqs.get_mut(*index).and_then(Option::as_mut)
                && let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut)
            {
                sq.in_flight = sq.in_flight.saturating_sub(1);
                cq.complete(Cqe::new(*cid, sq.place.qid, sq.head, Status::INTERNAL, 0));
                if cq.post() {
                    cq.announce(&shared.coalescing);
                }
            }
            false
        });
    }

    /// Carries out what is due, as if it had just been fetched.
    fn carry_out_stalled(&mut self, now: Instant) {
        let Self { sqs, cqs, engine, shared, parked, .. } = self;
        parked.stalled.retain(|(due, index, sqe)| {
            let Some(sq) = sqs.get_mut(*index).and_then(Option::as_mut) else { return false };
            if now < *due {
                return true;
            }
            let status = match engine.start(sqe, *index) {
                Ok(true) => Status::SUCCESS,
                Ok(false) => return false,
                Err(status) => status,
            };
            sq.in_flight = sq.in_flight.saturating_sub(1);
            if let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) {
                cq.complete(Cqe::new(sqe.cid, sq.place.qid, sq.head, status, 0));
                if cq.post() {
                    cq.announce(&shared.coalescing);
                }
            }
            false
        });
    }

    /// An Abort; the reply, if it is not for a command that hangs.
    pub(super) fn abort_hung(
        &mut self,
        index: usize,
        cid: u16,
        reply: AbortReply,
    ) -> Option<AbortReply> {
        let Self { sqs, cqs, shared, parked, .. } = self;
        let before = parked.hung.len() + parked.stalled.len();
        parked.hung.retain(|(_, sq, hung)| (*sq, *hung) != (index, cid));
        parked.stalled.retain(|(_, sq, sqe)| (*sq, sqe.cid) != (index, cid));
        if parked.hung.len() + parked.stalled.len() == before {
            return Some(reply);
        }
        let Some(sq) = sqs.get_mut(index).and_then(Option::as_mut) else { return Some(reply) };
        let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) else { return Some(reply) };
        sq.in_flight = sq.in_flight.saturating_sub(1);
        cq.complete(Cqe::new(cid, sq.place.qid, sq.head, Status::ABORT_REQUESTED, 0));
        if cq.post() {
            cq.announce(&shared.coalescing);
        }
        reply.answer(true);
        None
    }

    /// A submission queue is being deleted: what hangs in it ends without a word.
    pub(super) fn forget_hung(&mut self, index: usize) {
        let Self { sqs, cqs, parked, .. } = self;
        let before = parked.hung.len() + parked.stalled.len();
        parked.hung.retain(|(_, sq, _)| *sq != index);
        parked.stalled.retain(|(_, sq, _)| *sq != index);
        let forgotten = (before - parked.hung.len() - parked.stalled.len()) as u32;
        if let Some(sq) = sqs.get_mut(index).and_then(Option::as_mut) {
            sq.in_flight = sq.in_flight.saturating_sub(forgotten);
            if let Some(cq) = cqs.get_mut(sq.cq).and_then(Option::as_mut) {
                cq.reserved = cq.reserved.saturating_sub(forgotten);
            }
        }
    }
}
