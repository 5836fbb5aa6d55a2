//! State of a request on a zoned disk.

use shadowbell_disk::DiskError;
use shadowbell_memory::Segments;

/// Kind of a request to the disk below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A host's request that is passed to the disk below as one request.
    Plain,
    /// A write to zone number `zone`. With `flush`, a flush has to follow it (FUA).
    Write { zone: usize, flush: bool },
    /// The flush after a FUA write.
    Flush,
    /// A host's request that is split into several parts.
    Parts,
    /// A part of the request with this key.
    Part { parent: u32 },
    /// A Reset Zone action: for the zone at `at`, or with `all` (Select All), for all zones whose
    /// state permits it.
    Reset { at: u64, all: bool, stage: Stage },
}

/// Stage of a zone reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waits until the zone has no writes in flight.
    Asking,
    /// Discards the data of the zone. `from..to` is the range that has not been discarded yet.
    Discarding { from: u64, to: u64 },
}

/// Request on a zoned disk.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) kind: Kind,
    /// Serial number, unique in the queue.
    pub(super) serial: u64,
    /// Buffer of the request; empty while a request to the disk below holds it.
    pub(super) data: Segments,
    /// Number of parts in flight.
    pub(super) left: u32,
    pub(super) outcome: Result<(), DiskError>,
}

impl Task {
    pub(super) fn new(kind: Kind, serial: u64) -> Self {
        Self { kind, serial, data: Segments::new(), left: 0, outcome: Ok(()) }
    }
}
