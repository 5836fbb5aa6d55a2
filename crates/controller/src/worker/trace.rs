//! Trace records of doorbell decisions, and command events for the latency meter.

use super::meter::Meter;
use super::observer::Observer;
use crate::queue::{Cq, Sq};
use crate::shared::ControllerShared;
use crate::trace::Kind;
use shadowbell_doorbell::{ControllerStats, Truth};
use shadowbell_spec::{Cqe, Sqe};

/// Records the result of a look at a tail, and the new commands; `last` and `before` are the state
/// before the look.
#[cold]
pub(super) fn trace_look(
    trace: &mut Option<Observer>,
    shared: &ControllerShared,
    sq: &mut Sq,
    (last, before): (u16, ControllerStats),
) {
    let (now, qid, at) = (sq.tail.stats(), sq.layout.qid, u32::from(sq.tail.last()));
    // The recheck before a sleep has a counter of its own, so the tail itself is compared.
    if sq.tail.last() != last && sq.tail.state().truth == Truth::Shadow {
        record(trace, Kind::ShadowNew, shared, qid, at, last.into());
    }
    if now.event_idx_moved != before.event_idx_moved {
        record(trace, Kind::EventIdxMoved, shared, qid, at, 0);
    }
    // Commands found by a recheck before a sleep are included.
    let Some(ring) = &sq.ring else { return };
    let seen_at = time_of(trace);
    while sq.traced != sq.tail.last() {
        let sqe: Sqe = ring.read(u32::from(sq.traced));
        record(trace, Kind::CommandSeen, shared, qid, sqe.cid.into(), sqe.opcode.into());
        if let Some(Observer { meter: Some(meter), .. }) = trace {
            meter.sees(shared.id, qid, &sqe, seen_at);
        }
        sq.traced = sq.layout.size.next(sq.traced);
    }
}

/// Records the completions posted since the last call. Their entries are still in the queue: they
/// are not overwritten before the thread posts again.
#[cold]
pub(crate) fn trace_posted(trace: &mut Option<Observer>, shared: &ControllerShared, cq: &mut Cq) {
    let Some(ring) = &cq.ring else { return };
    let posted_at = time_of(trace);
    while cq.traced != cq.tail {
        let cqe: Cqe = ring.read(u32::from(cq.traced));
        let value = u32::from(cqe.cid) | u32::from(cqe.sq_id) << 16;
        let status = cqe.status().bits();
        record(trace, Kind::CompletionPosted, shared, cq.layout.qid, value, status.into());
        if let Some(Observer { meter: Some(meter), .. }) = trace {
            meter.posted(shared, &cqe, posted_at);
        }
        cq.traced = cq.layout.size.next(cq.traced);
    }
}

/// Time of the meter; 0 without a meter.
fn time_of(trace: &Option<Observer>) -> u64 {
    let meter = trace.as_ref().and_then(|trace| trace.meter.as_ref());
    meter.map_or(0, Meter::now)
}

/// Numbers of raised and of suppressed interrupts of a queue.
pub(super) fn interrupts(cq: &Cq) -> (u64, u64) {
    (cq.counters.interrupts.get(), cq.counters.interrupts_suppressed.get())
}

/// Records the interrupt decision since `before`.
#[cold]
pub(super) fn trace_interrupts(
    trace: &mut Option<Observer>,
    shared: &ControllerShared,
    cq: &Cq,
    before: (u64, u64),
) {
    let (qid, at, after) = (cq.layout.qid, u32::from(cq.tail), interrupts(cq));
    if after.0 != before.0 {
        record(trace, Kind::InterruptRaised, shared, qid, at, cq.vector().unwrap_or(0).into());
    } else if after.1 != before.1 {
        record(trace, Kind::InterruptSuppressed, shared, qid, at, 0);
    }
}

#[cold]
pub(crate) fn record(
    trace: &mut Option<Observer>,
    kind: Kind,
    shared: &ControllerShared,
    qid: u16,
    value: u32,
    extra: u32,
) {
    if let Some(trace) = trace {
        trace.record(kind, shared.id as u16, qid, value, extra);
    }
}
