//! Requests in flight at the disks, as the scanner of stalled disks has seen them.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Instant;

/// Requests of a disk that its storage has not answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InFlight {
    /// Number of requests.
    pub(super) requests: u64,
    /// Time when the oldest request was seen first.
    pub(super) since: Instant,
    /// True if the oldest request is older than `--stalled-after`.
    pub(super) stalled: bool,
}

/// Requests in flight by the id of the disk; disks without any are left out.
pub(super) type InFlightDisks = Mutex<BTreeMap<String, InFlight>>;
