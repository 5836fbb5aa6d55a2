//! CPU time budget of a controller's admin commands.

use std::time::{Duration, Instant};

/// Inverse of the long-term share: a fifth of a CPU.
const SHARE: u32 = 5;
/// Maximum CPU time at once, after a time without commands.
const BURST: Duration = Duration::from_millis(50);
/// CPU time that has to be refilled before a controller with an empty budget resumes.
const REFILL: Duration = Duration::from_millis(2);
/// Minimum interval of log messages.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// CPU time budget of a controller's admin commands. It refills at the rate of [`SHARE`], up to
/// [`BURST`]. A host in normal operation does not exhaust it. If the budget is exhausted, commands
/// are delayed and do not fail.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Time when the budget is full again. The missing CPU time is the remaining time / `SHARE`.
    full_at: Option<Instant>,
    /// Time before which no command is executed.
    resume_at: Option<Instant>,
    said: Option<Instant>,
}

impl Budget {
    pub(crate) const fn new() -> Self {
        Self { full_at: None, resume_at: None, said: None }
    }

    /// Charges CPU time. Returns true if the budget is exhausted and this should be logged, which
    /// is limited to once per [`SAY_AGAIN`].
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

    /// Time when commands resume, if they have to wait at `now`.
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

        // A booting guest: a thousand commands of 20 us within half a second.
        let mut budget = Budget::new();
        for n in 0..1000 {
            let now = start + Duration::from_micros(n * 500);
            assert_eq!(budget.wait_until(now), None);
            assert!(!budget.spend(Duration::from_micros(20), now));
        }
    }
}
