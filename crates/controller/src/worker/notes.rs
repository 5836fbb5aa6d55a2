//! What a tenant tells others: errors for the log, decisions for the trace.

use crate::shared::{Report, Shared};
use crate::trace::{Kind, TraceRing};
use crate::worker::io::Ended;
use crate::worker::queue::Sq;
use shadowbell_doorbell::ControllerStats;

#[cold]
pub(super) fn report_error(shared: &Shared, sqid: u16, ended: &Ended) {
    shared.report(Report::CommandError {
        sqid,
        cid: ended.cid,
        status: ended.status,
        nsid: ended.nsid,
        lba: ended.lba,
    });
}

#[cold]
pub(super) fn note_look(
    trace: &mut Option<TraceRing>,
    shared: &Shared,
    sq: &Sq,
    (last, before): (u16, ControllerStats),
) {
    let (now, qid, at) = (sq.tail.stats(), sq.place.qid, u32::from(sq.tail.last()));
    if now.found_new != before.found_new {
        note(trace, Kind::ShadowNew, shared, qid, at, last.into());
    }
    if now.event_idx_moved != before.event_idx_moved {
        note(trace, Kind::EventIdxMoved, shared, qid, at, 0);
    }
}

#[cold]
pub(super) fn note(
    trace: &mut Option<TraceRing>,
    kind: Kind,
    shared: &Shared,
    qid: u16,
    value: u32,
    extra: u32,
) {
    if let Some(trace) = trace {
        trace.record(kind, shared.id as u16, qid, value, extra);
    }
}
