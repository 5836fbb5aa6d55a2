//! A keeper that has nothing to do holds nothing that it can have again: one stands beside each
//! server, and sleeps for most of its life.

use std::time::{Duration, Instant};

/// After so long without anything to do.
const QUIET: Duration = Duration::from_millis(200);
/// It has not touched enough of the program since the last time to be worth it.
const LITTLE: u64 = 1 << 20;

/// Whether it is small.
#[derive(Debug, Default)]
pub(super) struct Rest {
    /// When it is to be made so, if nothing happens.
    at: Option<Instant>,
}

impl Rest {
    /// Something has happened, or it is time.
    pub(super) fn look(&mut self, now: Instant) {
        if self.at.take().is_some_and(|at| at <= now) {
            // Without it the keeper is larger, and no worse.
            let _ = shadowbell_memory::trim_program_pages();
        } else if held().is_some_and(|bytes| bytes > LITTLE) {
            self.at = Some(now + QUIET);
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        self.at
    }
}

/// The bytes of files that this process holds.
fn held() -> Option<u64> {
    let counts = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = counts.split(' ').nth(2)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
