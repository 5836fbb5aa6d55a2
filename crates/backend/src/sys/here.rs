//! Whether the thread of a queue makes writes itself.
//!
//! A write that was slow, because the system holds those back who write faster than the storage
//! takes it, is a sign of more to come: for a while the next ones are for other threads again, and
//! so never hold up reads.

use std::time::{Duration, Instant};

/// A call that takes longer has waited for something.
const SLOW: Duration = Duration::from_millis(1);
/// How many times as long as that none is made afterwards: so long reads may have been held up, and
/// not more often.
const AWAY: u32 = 8;

/// Whether the thread makes calls itself.
#[derive(Debug, Default)]
pub(super) struct Here {
    pub(super) may: bool,
    /// Not before that.
    not_before: Option<Instant>,
    /// The file can be asked for writes that do not wait.
    pub(super) can_ask: bool,
}

impl Here {
    /// Whether it is to make one now.
    pub(super) fn makes(&mut self, now: Instant) -> bool {
        if self.not_before.is_some_and(|then| now < then) {
            return false;
        }
        self.not_before = None;
        self.may
    }

    /// One has taken so long, until `now`.
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
        let (mut here, now) = (Here { may: true, ..Here::default() }, Instant::now());
        assert!(here.makes(now));
        here.took(SLOW / 2, now);
        assert!(here.makes(now));
        here.took(SLOW, now);
        assert!(!here.makes(now) && !here.makes(now + SLOW * (AWAY - 1)));
        assert!(here.makes(now + SLOW * AWAY));
        assert!(!Here::default().makes(now));
    }
}
