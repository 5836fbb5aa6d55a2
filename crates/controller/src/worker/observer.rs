//! Observer of an I/O thread: trace, command latency and failed commands.
//!
//! The observer consists of a trace and a latency meter. If both are off, the cost is one branch.
//!
//! * Trace records of doorbell decisions, and command events for the latency meter.
//! * Command latency measurement, at the same events as the trace. It does not burden the normal
//!   I/O path: it reads the entries again from the queues, and reads the clock once per batch.
//! * Reports of failed commands to the Error Information log.

use crate::config::MAX_NAMESPACES;
use crate::exec::CompletedCommand;
use crate::latency_stats::{CommandKind, LatencyCounters};
use crate::notice::{ControlHandle, Notice};
use crate::queue::{Cq, Sq};
use crate::shared::ControllerShared;
use crate::trace::{Kind, TraceRing};
use shadowbell_doorbell::{ControllerStats, Truth};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Trace ring and latency meter of an I/O thread.
#[derive(Debug, Default)]
pub(crate) struct Observer {
    ring: Option<TraceRing>,
    meter: Option<Meter>,
}

impl Observer {
    pub(super) fn record(&mut self, kind: Kind, controller: u16, qid: u16, value: u32, extra: u32) {
        if let Some(ring) = &mut self.ring {
            ring.record(kind, controller, qid, value, extra);
        }
    }
}

/// Starts recording of a trace in this ring, or ends it (`None`).
pub(super) fn trace(observer: &mut Option<Observer>, ring: Option<TraceRing>) {
    change(observer, |observer| observer.ring = ring);
}

/// Starts or stops the measurement of command latencies.
pub(super) fn measure(observer: &mut Option<Observer>, on: bool) {
    change(observer, |observer| {
        if on {
            observer.meter.get_or_insert_with(Meter::new);
        } else {
            observer.meter = None;
        }
    });
}

fn change(observer: &mut Option<Observer>, with: impl FnOnce(&mut Observer)) {
    let changed = observer.get_or_insert_default();
    with(changed);
    if changed.ring.is_none() && changed.meter.is_none() {
        *observer = None;
    }
}

/// Records the new commands that a read of the tail has found. `last` and `before` are the tail and
/// the doorbell statistics before that read.
#[cold]
pub(super) fn trace_poll(
    trace: &mut Option<Observer>,
    shared: &ControllerShared,
    sq: &mut Sq,
    (last, before): (u16, ControllerStats),
) {
    let (now, qid, at) = (sq.tail.stats(), sq.layout.qid, u32::from(sq.tail.last()));
    // The tail is compared, and not a counter, because a recheck before a sleep counts in another
    // counter.
    if sq.tail.last() != last && sq.tail.state().truth == Truth::Shadow {
        record(trace, Kind::ShadowNew, shared, qid, at, last.into());
    }
    if now.event_idx_moved != before.event_idx_moved {
        record(trace, Kind::EventIdxMoved, shared, qid, at, 0);
    }
    // All commands since the last call are recorded, including those that a recheck before a sleep
    // has found.
    let Some(ring) = &sq.ring else { return };
    let seen_at = time_of(trace);
    while sq.traced != sq.tail.last() {
        let sqe: Sqe = ring.read(u32::from(sq.traced));
        record(trace, Kind::CommandSeen, shared, qid, sqe.cid.into(), sqe.opcode.into());
        if let Some(Observer { meter: Some(meter), .. }) = trace {
            meter.record_command(shared.id, qid, &sqe, seen_at);
        }
        sq.traced = sq.layout.size.next(sq.traced);
    }
}

/// Records the completions that were posted since the last call. The entries are read from the
/// queue in guest memory. They are not overwritten before the thread posts again.
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

/// Current time of the meter, or 0 if there is no meter.
fn time_of(trace: &Option<Observer>) -> u64 {
    let meter = trace.as_ref().and_then(|trace| trace.meter.as_ref());
    meter.map_or(0, Meter::now)
}

/// Number of raised and number of suppressed interrupts of a queue.
pub(super) fn interrupts(cq: &Cq) -> (u64, u64) {
    (cq.counters.interrupts.get(), cq.counters.interrupts_suppressed.get())
}

/// Records if an interrupt was raised or suppressed since `before` was read by [`interrupts`].
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

/// Associativity of the table: commands per set.
const WAYS: usize = 4;
/// Number of sets of the table of commands in flight. The table has more entries than commands can
/// be in flight, so a set rarely overflows.
const SETS: usize = 8192;
/// Maximum number of cached namespace counters; beyond that, the cache is cleared.
const MAX_CACHED: usize = 4096;

/// Command latency measurement of one I/O thread.
pub(super) struct Meter {
    /// Commands in flight, in a set-associative table by key.
    seen: Box<[[TracedCommand; WAYS]]>,
    /// Counters by controller and namespace.
    counters: HashMap<(u32, u32), Arc<LatencyCounters>>,
    began: Instant,
}

/// Command in flight whose latency is measured.
#[derive(Clone, Copy)]
struct TracedCommand {
    /// Controller, submission queue and command identifier.
    key: u64,
    /// Time of the submission in nanoseconds since the meter was created; 0 for an empty slot.
    at: u64,
    nsid: u32,
    blocks: u32,
    kind: CommandKind,
}

const NONE: TracedCommand =
    TracedCommand { key: 0, at: 0, nsid: 0, blocks: 0, kind: CommandKind::Other };

fn key_of(controller: u32, sqid: u16, cid: u16) -> u64 {
    u64::from(controller) << 32 | u64::from(sqid) << 16 | u64::from(cid)
}

/// Kind of a command, and its number of blocks.
fn kind_of(sqe: &Sqe) -> (CommandKind, u32) {
    let blocks = (sqe.cdw12 & 0xffff) + 1;
    match NvmOpcode::try_from(sqe.opcode) {
        Ok(NvmOpcode::Read | NvmOpcode::Compare) => (CommandKind::Read, blocks),
        Ok(NvmOpcode::Write) => (CommandKind::Write, blocks),
        _ => (CommandKind::Other, 0),
    }
}

impl Meter {
    pub(super) fn new() -> Self {
        let seen = vec![[NONE; WAYS]; SETS].into_boxed_slice();
        Self { seen, counters: HashMap::new(), began: Instant::now() }
    }

    /// Current time in nanoseconds, never 0.
    pub(super) fn now(&self) -> u64 {
        (self.began.elapsed().as_nanos() as u64).max(1)
    }

    fn set(&mut self, key: u64) -> Option<&mut [TracedCommand; WAYS]> {
        // Multiplicative hash: the upper bits depend on the whole key.
        let at = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % SETS;
        self.seen.get_mut(at)
    }

    /// Records a command that was found in its queue at `now`.
    pub(super) fn record_command(&mut self, controller: u32, sqid: u16, sqe: &Sqe, now: u64) {
        // Invalid and broadcast NSIDs are ignored. Otherwise a guest could create counters for
        // them.
        if sqe.nsid == 0 || sqe.nsid > MAX_NAMESPACES as u32 {
            return;
        }
        let key = key_of(controller, sqid, sqe.cid);
        let (kind, blocks) = kind_of(sqe);
        let Some(set) = self.set(key) else { return };
        // An entry with the same key is stale: its command has ended without a completion. It is
        // replaced. Otherwise the oldest entry of the set is replaced, which probably is stale too.
        let same = set.iter().position(|seen| seen.at != 0 && seen.key == key);
        let oldest = || (0..WAYS).min_by_key(|way| set[*way].at).unwrap_or(0);
        let way = same.unwrap_or_else(oldest);
        set[way] = TracedCommand { key, at: now, nsid: sqe.nsid, blocks, kind };
    }

    /// Records a completion posted at `now`.
    pub(super) fn posted(&mut self, shared: &ControllerShared, cqe: &Cqe, now: u64) {
        let key = key_of(shared.id, cqe.sq_id, cqe.cid);
        let Some(set) = self.set(key) else { return };
        let Some(seen) = set.iter_mut().find(|seen| seen.at != 0 && seen.key == key) else {
            return;
        };
        let TracedCommand { at, nsid, blocks, kind, .. } = std::mem::replace(seen, NONE);
        if self.counters.len() >= MAX_CACHED {
            self.counters.clear();
        }
        let counters = self.counters.entry((shared.id, nsid));
        let counters = counters.or_insert_with(|| shared.measured(nsid));
        counters.count(kind, blocks, !cqe.status().is_success(), now.saturating_sub(at));
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("counters", &self.counters.len()).finish_non_exhaustive()
    }
}

/// Reports a command that has failed at its start.
#[cold]
pub(crate) fn report_error(control: &ControlHandle, sqid: u16, sqe: &Sqe, status: Status) {
    let (cid, nsid, lba) = (sqe.cid, sqe.nsid, sqe.cdw10_11());
    control.notify(Notice::CommandError { sqid, cid, status, nsid, lba });
}

/// Reports a command that has failed while it was in flight.
#[cold]
pub(crate) fn report_failure(control: &ControlHandle, sqid: u16, ended: &CompletedCommand) {
    let &CompletedCommand { cid, status, nsid, lba, .. } = ended;
    control.notify(Notice::CommandError { sqid, cid, status, nsid, lba });
}
