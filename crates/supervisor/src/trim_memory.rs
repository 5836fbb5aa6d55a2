//! Memory trim of an idle supervisor. Each server has a supervisor, which sleeps most of the
//! time, so it drops the pages of its program that the kernel can load again from the file.

use std::time::{Duration, Instant};

/// Idle time of the supervisor before a trim.
const IDLE: Duration = Duration::from_millis(200);
/// Resident file pages, in bytes, below which a trim is not worth its cost.
const MIN_RESIDENT: u64 = 1 << 20;

/// Timer of the next trim.
#[derive(Debug, Default)]
pub(super) struct TrimTimer {
    /// Time of the trim, if no event wakes the supervisor before.
    pub(super) at: Option<Instant>,
}

impl TrimTimer {
    /// Trims the memory if the supervisor was idle until the time `at`. Otherwise an event woke it
    /// earlier, and the timer is restarted. The main loop calls this before each wait.
    pub(super) fn poll(&mut self, now: Instant) {
        if self.at.take().is_some_and(|at| at <= now) {
            // If the trim fails, only memory is wasted.
            let _ = shadowbell_memory::trim_program_pages();
        } else if held().is_some_and(|bytes| bytes > MIN_RESIDENT) {
            self.at = Some(now + IDLE);
        }
    }
}

/// Bytes of resident file pages of this process.
fn held() -> Option<u64> {
    let counts = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = counts.split(' ').nth(2)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
