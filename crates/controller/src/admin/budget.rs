//! How much of a processor the admin commands of one controller may take.

use std::time::{Duration, Instant};

/// A fifth, in the long run.
const SHARE: u32 = 5;
/// What may be taken at once, after a while without commands.
const BURST: Duration = Duration::from_millis(50);
/// Whoever has spent it all waits until there is this much again.
const REFILL: Duration = Duration::from_millis(2);
/// How often the log says so.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// The time of a processor that a controller's admin commands may take: what is spent comes back
/// at the rate of [`SHARE`], up to [`BURST`]. No host that has something to find out meets the end
/// of it; one that does waits, and nothing fails.
#[derive(Debug)]
pub(crate) struct Budget {
    /// All of it is there at this time; what is missing before takes `SHARE` times as long.
    full_at: Option<Instant>,
    /// Nothing goes on before this time.
    resume_at: Option<Instant>,
    said: Option<Instant>,
}

impl Budget {
    pub(crate) const fn new() -> Self {
        Self { full_at: None, resume_at: None, said: None }
    }

    /// So much was spent until `now`. Whether that is worth a word in the log: it was too much, for
    /// the first time in a while.
    pub(crate) fn spend(&mut self, used: Duration, now: Instant) -> bool {
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + used * SHARE;
        self.full_at = Some(full_at);
        let missing = full_at.saturating_duration_since(now);
        if missing <= BURST * SHARE {
            return false;
        }
        self.resume_at = Some(now + (missing - BURST * SHARE) + REFILL * SHARE);
        let is_new = self.said.is_none_or(|at| now.saturating_duration_since(at) >= SAY_AGAIN);
        if is_new {
            self.said = Some(now);
        }
        is_new
    }

    /// When commands go on, if they have to wait at `now`.
    pub(crate) fn wait_until(&self, now: Instant) -> Option<Instant> {
        self.resume_at.filter(|at| *at > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_gets_a_fifth_and_an_honest_host_all_it_wants() {
        let (mut budget, start) = (Budget::new(), Instant::now());
        let turn = Duration::from_micros(100);
        let (mut now, mut used, mut said) = (start, Duration::ZERO, 0);
        while now - start < Duration::from_secs(130) {
            if let Some(until) = budget.wait_until(now) {
                now = until;
            }
            now += turn;
            used += turn;
            said += u32::from(budget.spend(turn, now));
        }
        let fifth = (now - start) / SHARE;
        assert!(used >= fifth && used <= fifth + BURST + turn, "{used:?}");
        assert_eq!(said, 3, "once a minute");

        // A guest that boots: a thousand commands of 20 us, in half a second.
        let mut budget = Budget::new();
        for n in 0..1000 {
            let now = start + Duration::from_micros(n * 500);
            assert_eq!(budget.wait_until(now), None);
            assert!(!budget.spend(Duration::from_micros(20), now));
        }
    }
}
