//! Lines of the log that a client can cause.

use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

/// Lines that may come at once.
const BURST: u32 = 16;

/// Another line comes after this time.
const EACH: Duration = Duration::from_secs(10);

/// Lets some of the lines through that a client causes, and counts the others. For all clients of a
/// device, one after the other: one that comes again is not a new one.
#[derive(Debug)]
pub struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    left: u32,
    /// When a line was added to those that are left.
    added: Option<Instant>,
    suppressed: u64,
}

impl Default for LogLimit {
    fn default() -> Self {
        Self(Mutex::new(State { left: BURST, added: None, suppressed: 0 }))
    }
}

impl LogLimit {
    /// Logs a warning, if there may be another. It says how many were left out before it.
    pub fn warn(&self, line: impl fmt::Display) {
        match self.allow(Instant::now()) {
            Some(0) => warn!("{line}"),
            Some(suppressed) => warn!("{line} ({suppressed} lines of this client were left out)"),
            None => {}
        }
    }

    /// Whether there may be a line now, and how many were left out since the last one.
    pub fn allow(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        let added = *state.added.get_or_insert(now);
        let periods = now.saturating_duration_since(added).as_secs() / EACH.as_secs();
        if periods > 0 {
            let more = u32::try_from(periods).unwrap_or(BURST);
            state.left = state.left.saturating_add(more).min(BURST);
            state.added = Some(now);
        }
        match state.left.checked_sub(1) {
            Some(left) => {
                state.left = left;
                Some(std::mem::take(&mut state.suppressed))
            }
            None => {
                state.suppressed += 1;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_counted() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        let at = |seconds| limit.allow(start + Duration::from_secs(seconds));
        assert!((0..BURST).all(|_| at(0) == Some(0)));
        assert!((0..1000).all(|n| at(n % 10).is_none()));
        assert_eq!((at(10), at(19)), (Some(1000), None));
        assert_eq!((at(40), at(40), at(41)), (Some(1), Some(0), Some(0)));
        assert_eq!(at(49), None);
        // A clock that another thread has read earlier is no reason for another line.
        assert_eq!(at(0), None);
    }
}
