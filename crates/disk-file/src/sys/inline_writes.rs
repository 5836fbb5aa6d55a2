//! Policy of inline writes by the queue's own thread.
//!
//! A slow write indicates that the kernel throttles writers that are faster than the storage. More
//! slow writes are likely then, so the next writes go to other threads for a while, to avoid
//! delaying reads.

use std::time::{Duration, Instant};

/// A longer call has blocked.
const SLOW: Duration = Duration::from_millis(1);
/// Pause after a slow inline write, as a multiple of its duration. It bounds the fraction of time
/// in which reads are delayed.
const AWAY: u32 = 8;

/// State of the inline write policy.
#[derive(Debug, Default)]
pub(super) struct InlineWrites {
    pub(super) may: bool,
    /// End of the current pause.
    not_before: Option<Instant>,
    /// The file supports writes that fail instead of blocking.
    pub(super) can_ask: bool,
}

impl InlineWrites {
    /// True if the next write may be made inline.
    pub(super) fn makes(&mut self, now: Instant) -> bool {
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
    fn who_was_slow_stays_away_for_a_while() {
        let (mut inline, now) =
            (InlineWrites { may: true, ..InlineWrites::default() }, Instant::now());
        assert!(inline.makes(now));
        inline.took(SLOW / 2, now);
        assert!(inline.makes(now));
        inline.took(SLOW, now);
        assert!(!inline.makes(now) && !inline.makes(now + SLOW * (AWAY - 1)));
        assert!(inline.makes(now + SLOW * AWAY));
        assert!(!InlineWrites::default().makes(now));
    }
}
