//! Policy of inline writes, the writes that a queue's thread executes itself.
//!
//! A slow write indicates that the kernel throttles writers that are faster than the storage.
//! Further writes are then likely to be slow too. So for a while, other threads execute all writes,
//! and the queue's own thread can continue with reads.

use std::time::{Duration, Instant};

/// Duration from which an inline write counts as slow: it has blocked.
const SLOW: Duration = Duration::from_millis(1);
/// Length of the pause without inline writes after a slow one, as a multiple of the slow write's
/// duration. So inline writes delay reads for at most a ninth of the time.
const AWAY: u32 = 8;

/// State of the inline write policy.
#[derive(Debug, Default)]
pub(super) struct InlineWrites {
    pub(super) may: bool,
    /// End of the current pause. No write is executed inline before it.
    not_before: Option<Instant>,
    /// True if the file supports writes that fail instead of blocking.
    pub(super) supports_nowait: bool,
}

impl InlineWrites {
    /// True if the next write may be executed inline.
    pub(super) fn allows(&mut self, now: Instant) -> bool {
        if self.not_before.is_some_and(|then| now < then) {
            return false;
        }
        self.not_before = None;
        self.may
    }

    /// Records the duration of an inline write that ended at `now`.
    pub(super) fn took(&mut self, time: Duration, now: Instant) {
        if time >= SLOW {
            self.not_before = Some(now + time * AWAY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inline_writes_pause_after_a_slow_one() {
        let (mut inline, now) =
            (InlineWrites { may: true, ..InlineWrites::default() }, Instant::now());
        assert!(inline.allows(now));
        inline.took(SLOW / 2, now);
        assert!(inline.allows(now));
        inline.took(SLOW, now);
        assert!(!inline.allows(now) && !inline.allows(now + SLOW * (AWAY - 1)));
        assert!(inline.allows(now + SLOW * AWAY));
        assert!(!InlineWrites::default().allows(now));
    }
}
