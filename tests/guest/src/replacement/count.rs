//! Counters of the events (upgrades or kills) of a server.

use std::time::Duration;

/// Number of events, and the duration of the longest one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Count {
    pub(super) done: u32,
    /// Upgrades that were cancelled because the old process did not quiesce in time. The old
    /// process continues to serve, and the guest does not notice.
    pub(super) cancelled: u32,
    pub(super) longest: Duration,
}
