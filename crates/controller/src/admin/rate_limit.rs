//! How often the owner of a namespace is told of the same thing.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A host may fail a million writes a second: its owner is told again after this time.
const AGAIN: Duration = Duration::from_secs(60);

/// When the owner was told, by namespace.
#[derive(Debug, Default)]
pub(crate) struct RateLimit(BTreeMap<u32, Instant>);

impl RateLimit {
    /// Something happened to `nsid` at `now`: whether that is to be told.
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
    fn an_owner_is_told_once_a_minute_of_each_namespace() {
        let (mut limit, start) = (RateLimit::default(), Instant::now());
        let mut at = |nsid, seconds| limit.allows(nsid, start + Duration::from_secs(seconds));
        let allowed: Vec<u64> = (0..200).filter(|second| at(1, *second)).collect();
        assert_eq!(allowed, [0, 60, 120, 180]);
        assert!(at(2, 199) && !at(2, 200));
        // A clock that another thread has read earlier is no reason to be told again.
        assert!(!at(1, 0));
    }
}
