//! Counter of requests that failed because of the disk.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Default)]
pub(crate) struct FailureCount(AtomicU64);

impl FailureCount {
    /// Counts a failure. Only the first one is logged, because a removed disk fails every
    /// request.
    pub(crate) fn record(&self, error: &dyn Display) {
        if self.0.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::error!("a request failed, and further failures are only counted: {error}");
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
