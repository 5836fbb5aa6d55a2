//! Observer of an I/O thread: trace and latency meter. Both disabled, they cost one branch.

use super::meter::Meter;
use crate::trace::{Kind, TraceRing};

/// Trace ring and latency meter of an I/O thread.
#[derive(Debug, Default)]
pub(crate) struct Observer {
    ring: Option<TraceRing>,
    pub(super) meter: Option<Meter>,
}

impl Observer {
    pub(super) fn record(&mut self, kind: Kind, controller: u16, qid: u16, value: u32, extra: u32) {
        if let Some(ring) = &mut self.ring {
            ring.record(kind, controller, qid, value, extra);
        }
    }
}

/// Starts recording in this ring, or stops.
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
