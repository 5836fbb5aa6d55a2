//! Storage that is used up: who is told of it, and how often.
//!
//! A write that needs room where there is none ends with Capacity Exceeded, and with Do Not Retry,
//! because nothing that the host does by itself at once makes room. The SMART / Health log page then has
//! no Available Spare and the critical warning that belongs to it, and hosts that asked for that get the
//! asynchronous event (Base 2.1, 5.1.12.1.3, "Available Spare", and 5.1.2, "Spare Below Threshold"). The
//! specification has no other word for a namespace below which the storage is full. Whoever owns the
//! storage is told in the log; so is that of one whose data could not be written back.

use super::{Control, Deferred};
use crate::controller::{Event, Inner};
use shadowbell_spec::event::AsyncEvent;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A host may fail a million writes a second: its owner is told again after this time.
const AGAIN: Duration = Duration::from_secs(60);

/// When the owner was told, by namespace.
#[derive(Debug, Default)]
pub(crate) struct Told(BTreeMap<u32, Instant>);

impl Told {
    /// A write to `nsid` has failed `now`: whether that is to be told.
    fn is_news(&mut self, nsid: u32, now: Instant) -> bool {
        let is_old = |at: &Instant| now.saturating_duration_since(*at) < AGAIN;
        if self.0.get(&nsid).is_some_and(is_old) {
            return false;
        }
        self.0.insert(nsid, now);
        true
    }
}

impl Control {
    /// A command for `nsid` found no room.
    pub(crate) fn no_room(&mut self, inner: &Inner, nsid: u32, deferred: &mut Deferred) {
        if !inner.namespaces.iter().any(|ns| ns.nsid() == nsid) {
            return;
        }
        if is_any_full(inner) {
            self.raise(inner, AsyncEvent::SPARE_BELOW_THRESHOLD);
        }
        if self.full_told.is_news(nsid, Instant::now()) {
            deferred.event(Event::Full(nsid));
        }
    }

    /// A write or a flush has failed: says which disks have lost what they were given.
    pub(crate) fn tell_losses(&mut self, inner: &Inner, deferred: &mut Deferred) {
        let now = Instant::now();
        for namespace in inner.namespaces.iter().filter(|ns| ns.disk().has_lost()) {
            if self.loss_told.is_news(namespace.nsid(), now) {
                deferred.event(Event::Lost(namespace.nsid()));
            }
        }
    }
}

/// Whether the storage of any namespace has no room, as far as that was noticed.
pub(super) fn is_any_full(inner: &Inner) -> bool {
    inner.namespaces.iter().any(|ns| ns.disk().is_full())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_told_once_a_minute_of_each_namespace() {
        let (mut told, start) = (Told::default(), Instant::now());
        let mut at = |nsid, seconds| told.is_news(nsid, start + Duration::from_secs(seconds));
        let heard: Vec<u64> = (0..200).filter(|second| at(1, *second)).collect();
        assert_eq!(heard, [0, 60, 120, 180]);
        assert!(at(2, 199) && !at(2, 200));
        // A clock that another thread has read earlier is no reason to be told again.
        assert!(!at(1, 0));
    }
}
