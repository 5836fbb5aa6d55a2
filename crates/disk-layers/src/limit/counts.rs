//! Counters of the requests of a disk that wait for its limits.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Requests that wait for the limits of a disk, counted by its queues.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    /// Number of requests that had to wait.
    pub(super) delayed: Arc<AtomicU64>,
    /// Number of requests that wait.
    pub(super) waiting: Arc<AtomicU64>,
}
