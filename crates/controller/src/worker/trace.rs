//! Decisions that go to the trace.

use crate::queue::Sq;
use crate::shared::ControllerShared;
use crate::trace::{Kind, TraceRing};
use shadowbell_doorbell::ControllerStats;

/// Records what a look at a tail has found or moved; `last` and `before` are from before the look.
#[cold]
pub(super) fn trace_look(
    trace: &mut Option<TraceRing>,
    shared: &ControllerShared,
    sq: &Sq,
    (last, before): (u16, ControllerStats),
) {
    let (now, qid, at) = (sq.tail.stats(), sq.layout.qid, u32::from(sq.tail.last()));
    if now.found_new != before.found_new {
        record(trace, Kind::ShadowNew, shared, qid, at, last.into());
    }
    if now.event_idx_moved != before.event_idx_moved {
        record(trace, Kind::EventIdxMoved, shared, qid, at, 0);
    }
}

#[cold]
pub(super) fn record(
    trace: &mut Option<TraceRing>,
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
