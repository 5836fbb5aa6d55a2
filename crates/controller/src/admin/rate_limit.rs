//! Rate limit of a namespace's events.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Minimum interval of events. Without a limit, a host could cause one per failed write.
const AGAIN: Duration = Duration::from_secs(60);

/// Time of the last event by NSID.
#[derive(Debug, Default)]
pub(crate) struct RateLimit(BTreeMap<u32, Instant>);

impl RateLimit {
    /// Returns true if an event of `nsid` at `now` may be reported.
    pub(crate) fn allows(&mut self, nsid: u32, now: Instant) -> bool {
        let is_old = |at: &Instant| now.saturating_duration_since(*at) < AGAIN;
        if self.0.get(&nsid).is_some_and(is_old) {
            return false;
        }
        self.0.insert(nsid, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_an_event_a_minute_for_each_namespace() {
        let (mut limit, start) = (RateLimit::default(), Instant::now());
        let mut at = |nsid, seconds| limit.allows(nsid, start + Duration::from_secs(seconds));
        let allowed: Vec<u64> = (0..200).filter(|second| at(1, *second)).collect();
        assert_eq!(allowed, [0, 60, 120, 180]);
        assert!(at(2, 199) && !at(2, 200));
        // An earlier time, read by another thread, does not allow another event.
        assert!(!at(1, 0));
    }
}
