//! Policy of inline writes, which the thread of a queue executes itself.
//!
//! A slow write indicates that the kernel throttles writers that are faster than the storage. More
//! slow writes are then likely. So for a while, other threads execute the writes, and the thread of
//! the queue can continue with reads.

use std::time::{Duration, Instant};

/// Duration from which an inline write counts as slow: it has blocked.
const SLOW: Duration = Duration::from_millis(1);
/// Length of the pause after a slow inline write, as a multiple of the write's duration. The pause
/// limits the fraction of time in which reads are delayed.
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
