//! Rate limit of log messages that a client can cause.

use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::warn;

/// Maximum number of messages that may be logged without a pause.
const BURST: u32 = 16;

/// Interval after which one more message is allowed.
const INTERVAL: Duration = Duration::from_secs(10);

/// Rate limit of log messages that a client can cause. All clients of a device share one limit, so
/// a client cannot evade it by connecting again.
#[derive(Debug)]
pub struct LogLimit(Mutex<State>);

#[derive(Debug)]
struct State {
    left: u32,
    /// Time of the last increase of `left`.
    added: Option<Instant>,
    suppressed: u64,
}

impl Default for LogLimit {
    fn default() -> Self {
        Self(Mutex::new(State { left: BURST, added: None, suppressed: 0 }))
    }
}

impl LogLimit {
    /// Logs `line` as a warning if the limit allows it, with the number of messages that were
    /// suppressed since the last logged one.
    pub fn warn(&self, line: impl fmt::Display) {
        match self.allow(Instant::now()) {
            Some(0) => warn!("{line}"),
            Some(suppressed) => warn!("{line} ({suppressed} lines of this client were suppressed)"),
            None => {}
        }
    }

    /// Returns the number of messages suppressed since the last allowed one, or `None` if no
    /// message is allowed at the time `now`.
    pub fn allow(&self, now: Instant) -> Option<u64> {
        let mut state = self.0.lock();
        let added = *state.added.get_or_insert(now);
        let periods = now.saturating_duration_since(added).as_secs() / INTERVAL.as_secs();
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
    fn suppressed_messages_are_counted() {
        let (limit, start) = (LogLimit::default(), Instant::now());
        let at = |seconds| limit.allow(start + Duration::from_secs(seconds));
        assert!((0..BURST).all(|_| at(0) == Some(0)));
        assert!((0..1000).all(|n| at(n % 10).is_none()));
        assert_eq!((at(10), at(19)), (Some(1000), None));
        assert_eq!((at(40), at(40), at(41)), (Some(1), Some(0), Some(0)));
        assert_eq!(at(49), None);
        // The time may be before that of the previous call, if another thread reads the clock first
        // and takes the lock later. No message is allowed in that case.
        assert_eq!(at(0), None);
    }
}
