//! Asynchronous events, and the rate limit of a namespace's events.
//!
//! A host keeps some Asynchronous Event Requests outstanding, and an event completes one of them.
//! Further events of the same type are masked until the host has read the event's log page (Base
//! 2.1, 5.1.2 "Asynchronous Event Request command"). This masking bounds the number of events.

use super::MAX_EVENT_REQUESTS;
use crate::saved::{SavedEvent, SavedEvents};
use shadowbell_spec::Status;
use shadowbell_spec::event::{
    AsyncEvent, TYPE_ERROR, TYPE_IO_COMMAND_SET, TYPE_NOTICE, TYPE_SMART,
};
use shadowbell_spec::feature::AsyncEventConfig;
use shadowbell_spec::log::CriticalWarning;
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Maximum number of pending events. It exceeds the number of different events, so that no event is
/// lost.
const MAX_PENDING: usize = 16;

/// Completion of an Asynchronous Event Request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Completion {
    /// Command identifier of the request.
    pub(crate) cid: u16,
    /// Dword 0: type, information and log page of the event.
    pub(crate) dw0: u32,
}

/// Asynchronous events of a controller, and outstanding Asynchronous Event Requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AsyncEvents {
    /// Command identifiers of outstanding requests, oldest first.
    outstanding: VecDeque<u16>,
    /// Events not yet reported, oldest first, without duplicates.
    pending: VecDeque<AsyncEvent>,
    /// Reported events whose log page has not been read: their types are masked.
    unread: Vec<AsyncEvent>,
    config: AsyncEventConfig,
}

impl AsyncEvents {
    /// Adds an Asynchronous Event Request. If an event is pending, returns the completion of the
    /// oldest outstanding request. That is not necessarily the new request.
    ///
    /// # Errors
    /// Asynchronous Event Request Limit Exceeded.
    pub(crate) fn request(&mut self, cid: u16) -> Result<Option<Completion>, Status> {
        if self.outstanding.len() >= MAX_EVENT_REQUESTS {
            // DNR is not set, because a retry may succeed.
            return Err(Status::AER_LIMIT);
        }
        self.outstanding.push_back(cid);
        Ok(self.report())
    }

    /// Raises an event. The caller must update the event's log page before the call, because the
    /// host may read that page before this method returns.
    pub(crate) fn raise(&mut self, event: AsyncEvent) -> Option<Completion> {
        // If the host has not read the log page of an earlier occurrence, the new occurrence needs
        // no event of its own: the page that the host reads covers both.
        let is_known = self.unread.contains(&event) || self.pending.contains(&event);
        if !is_known && self.is_enabled(event) && self.pending.len() < MAX_PENDING {
            self.pending.push_back(event);
        }
        self.report()
    }

    /// Handles the host's read of log page `lid`. If Retain Asynchronous Event (`rae`) is not set,
    /// the page's events are cleared, and the next event of their type can be reported.
    pub(crate) fn log_read(&mut self, lid: u8, rae: bool) -> Option<Completion> {
        if !rae {
            self.unread.retain(|event| event.lid != lid);
        }
        self.report()
    }

    /// Sets the Asynchronous Event Configuration feature. Pending events that are no longer
    /// enabled are dropped.
    pub(crate) fn configure(&mut self, config: AsyncEventConfig) -> Option<Completion> {
        self.config = config;
        let mut pending = std::mem::take(&mut self.pending);
        pending.retain(|event| self.is_enabled(*event));
        self.pending = pending;
        self.report()
    }

    /// Removes the Asynchronous Event Request `cid`, which an Abort command names. Returns true if
    /// it was outstanding; the caller then completes the request.
    pub(crate) fn abort(&mut self, cid: u16) -> bool {
        let found = self.outstanding.iter().position(|outstanding| *outstanding == cid);
        found.and_then(|at| self.outstanding.remove(at)).is_some()
    }

    /// Drops requests and events at a Controller Level Reset, without completions, and restores the
    /// default configuration.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn save(&self) -> SavedEvents {
        let save = |event: &AsyncEvent| (event.kind, event.info, event.lid);
        SavedEvents {
            outstanding: self.outstanding.iter().copied().collect(),
            pending: self.pending.iter().map(save).collect(),
            unread: self.unread.iter().map(save).collect(),
            config: self.config.into_bits(),
        }
    }

    pub(crate) fn restore(saved: &SavedEvents) -> Self {
        let event = |&(kind, info, lid): &SavedEvent| AsyncEvent { kind, info, lid };
        Self {
            outstanding: saved.outstanding.iter().copied().take(MAX_EVENT_REQUESTS).collect(),
            pending: saved.pending.iter().map(event).take(MAX_PENDING).collect(),
            unread: saved.unread.iter().map(event).collect(),
            config: AsyncEventConfig::from_bits(saved.config),
        }
    }

    fn report(&mut self) -> Option<Completion> {
        let masked = |event: &AsyncEvent| self.unread.iter().any(|other| other.kind == event.kind);
        let at = self.pending.iter().position(|event| !masked(event))?;
        let cid = self.outstanding.pop_front()?;
        let event = self.pending.remove(at)?;
        if matches!(event.kind, TYPE_ERROR | TYPE_SMART | TYPE_NOTICE | TYPE_IO_COMMAND_SET) {
            self.unread.push(event);
        }
        Some(Completion { cid, dw0: event.dw0() })
    }

    /// True if the event is enabled (Base 2.1, 5.1.25.1, "Asynchronous Event Configuration").
    /// Error events cannot be disabled.
    fn is_enabled(&self, event: AsyncEvent) -> bool {
        let warnings = CriticalWarning::from_bits(self.config.smart());
        match event {
            AsyncEvent::SPARE_BELOW_THRESHOLD => warnings.spare(),
            AsyncEvent::TEMPERATURE_THRESHOLD => warnings.temperature(),
            // All other warnings share the event "NVM subsystem reliability has been compromised".
            AsyncEvent::SUBSYSTEM_RELIABILITY => {
                warnings.with_spare(false).with_temperature(false).into_bits() != 0
            }
            AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED => self.config.nan(),
            AsyncEvent::FIRMWARE_ACTIVATION_STARTING => self.config.fan(),
            AsyncEvent::TELEMETRY_LOG_CHANGED => self.config.tln(),
            AsyncEvent::ANA_CHANGE => self.config.anacn(),
            _ => true,
        }
    }
}

/// Minimum interval between two events of a namespace. Without it, each failed write would raise an
/// event.
const MIN_INTERVAL: Duration = Duration::from_secs(60);

/// Time of the last event of each namespace, by NSID.
#[derive(Debug, Default)]
pub(crate) struct RateLimit(BTreeMap<u32, Instant>);

impl RateLimit {
    /// Returns true if an event of `nsid` at `now` may be reported.
    pub(crate) fn allows(&mut self, nsid: u32, now: Instant) -> bool {
        let is_old = |at: &Instant| now.saturating_duration_since(*at) < MIN_INTERVAL;
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
    use proptest::prelude::*;
    use shadowbell_spec::log::lid;

    const REGISTER: AsyncEvent = AsyncEvent::INVALID_DOORBELL_REGISTER;
    const VALUE: AsyncEvent = AsyncEvent::INVALID_DOORBELL_VALUE;
    const CHANGED: AsyncEvent = AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED;
    const HOT: AsyncEvent = AsyncEvent::TEMPERATURE_THRESHOLD;

    fn all_enabled() -> AsyncEvents {
        let mut events = AsyncEvents::default();
        events.configure(AsyncEventConfig::from_bits(u32::MAX));
        events
    }

    fn completes(cid: u16, event: AsyncEvent) -> Option<Completion> {
        Some(Completion { cid, dw0: event.dw0() })
    }

    #[test]
    fn the_fifth_request_is_one_too_many() {
        let mut events = AsyncEvents::default();
        for cid in 0..4 {
            assert_eq!(events.request(cid), Ok(None));
        }
        assert_eq!(events.request(4), Err(Status::AER_LIMIT));
        assert_eq!(events.outstanding.len(), 4);
        assert!(events.abort(2));
        assert!(!events.abort(2));
        assert_eq!(events.request(4), Ok(None));
        // The oldest request completes first.
        assert_eq!(events.raise(VALUE), completes(0, VALUE));
        assert_eq!(events.outstanding.len(), 3);
    }

    #[test]
    fn an_event_waits_for_a_request() {
        let mut events = AsyncEvents::default();
        assert_eq!(events.raise(REGISTER), None);
        assert_eq!(events.raise(REGISTER), None);
        assert_eq!(events.request(9), Ok(completes(9, REGISTER)));
        assert_eq!(events.request(10), Ok(None), "it was one event");
        // Dword 0 of REGISTER: type "error" in bits 2:0, information 0, error log page in bits
        // 23:16.
        assert_eq!(REGISTER.dw0(), 0x0001_0000);
        assert_eq!(VALUE.dw0(), 0x0001_0100);
        assert_eq!(CHANGED.dw0(), 0x0004_0002);
        assert_eq!(HOT.dw0(), 0x0002_0101);
    }

    #[test]
    fn a_type_is_masked_until_its_log_page_is_read() {
        let mut events = all_enabled();
        (1..=4).for_each(|cid| assert_eq!(events.request(cid), Ok(None)));
        assert_eq!(events.raise(VALUE), completes(1, VALUE));
        assert_eq!(events.raise(VALUE), None, "the log page will tell of both");
        assert_eq!(events.raise(REGISTER), None, "of the same type");
        assert_eq!(events.raise(CHANGED), completes(2, CHANGED), "of another");
        assert_eq!(events.log_read(lid::SMART_HEALTH, false), None, "another page");
        assert_eq!(events.log_read(lid::ERROR_INFORMATION, true), None, "retained");
        assert_eq!(events.log_read(lid::ERROR_INFORMATION, false), completes(3, REGISTER));
        assert_eq!(events.log_read(lid::ERROR_INFORMATION, false), None);
        assert_eq!(events.raise(VALUE), completes(4, VALUE), "after reading, anew");
    }

    #[test]
    fn reading_between_report_and_next_request() {
        let mut events = all_enabled();
        assert_eq!(events.request(1), Ok(None));
        assert_eq!(events.raise(CHANGED), completes(1, CHANGED));
        assert_eq!(events.log_read(CHANGED.lid, false), None);
        assert_eq!(events.raise(CHANGED), None, "no request, but not lost");
        assert_eq!(events.request(2), Ok(completes(2, CHANGED)));
    }

    #[test]
    fn events_that_are_not_enabled_are_not_reported() {
        let mut events = AsyncEvents::default();
        assert_eq!(events.request(1), Ok(None));
        assert_eq!(events.raise(CHANGED), None);
        assert_eq!(events.raise(HOT), None);
        assert_eq!(events.raise(AsyncEvent::SUBSYSTEM_RELIABILITY), None);
        events.configure(AsyncEventConfig::new().with_nan(true).with_smart(0b1010));
        assert_eq!(events.log_read(CHANGED.lid, false), None, "what was dropped stays dropped");
        assert_eq!(events.raise(AsyncEvent::SPARE_BELOW_THRESHOLD), None);
        assert_eq!(events.raise(HOT), completes(1, HOT));
        assert_eq!(events.raise(CHANGED), None);
        assert_eq!(events.log_read(HOT.lid, false), None);
        assert_eq!(events.raise(AsyncEvent::SUBSYSTEM_RELIABILITY), None);
        // A pending event that is disabled before a request arrives is dropped.
        events.configure(AsyncEventConfig::new().with_smart(0b1000));
        let reliability = completes(2, AsyncEvent::SUBSYSTEM_RELIABILITY);
        assert_eq!(events.request(2), Ok(reliability));
        assert_eq!(events.request(3), Ok(None));
    }

    #[test]
    fn a_reset_clears_events_requests_and_masks() {
        let mut events = all_enabled();
        assert_eq!(events.request(1), Ok(None));
        assert_eq!(events.raise(VALUE), completes(1, VALUE));
        events.raise(REGISTER);
        assert_eq!(events.request(2), Ok(None));
        events.clear();
        assert_eq!(events, AsyncEvents::default());
        assert!(!events.abort(2));
        assert_eq!(events.request(1), Ok(None));
        assert_eq!(events.raise(VALUE), completes(1, VALUE), "not masked");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Request(u16),
        Raise(usize),
        Read(u8, bool),
        Configure(u32),
        Abort(u16),
        Clear,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..8u16).prop_map(Step::Request),
            6 => (0..AsyncEvent::ALL.len()).prop_map(Step::Raise),
            3 => (0..0x90u8, any::<bool>()).prop_map(|(lid, rae)| Step::Read(lid % 5, rae)),
            1 => any::<u32>().prop_map(Step::Configure),
            1 => (0..8u16).prop_map(Step::Abort),
            1 => Just(Step::Clear),
        ]
    }

    proptest! {
        /// For any sequence of host actions: the state is bounded, only outstanding requests
        /// complete, masked types do not complete, and no reportable event stays pending.
        #[test]
        fn invariants(steps in prop::collection::vec(step(), 0..200)) {
            let mut events = AsyncEvents::default();
            for step in steps {
                let mut before = events.clone();
                let completion = match step {
                    Step::Request(cid) => match events.request(cid) {
                        Ok(completion) => {
                            before.outstanding.push_back(cid);
                            completion
                        }
                        Err(_) => {
                            prop_assert_eq!(before.outstanding.len(), MAX_EVENT_REQUESTS);
                            None
                        }
                    },
                    Step::Raise(at) => events.raise(AsyncEvent::ALL[at]),
                    Step::Read(lid, rae) => {
                        if !rae {
                            before.unread.retain(|event| event.lid != lid);
                        }
                        events.log_read(lid, rae)
                    }
                    Step::Configure(bits) => events.configure(AsyncEventConfig::from_bits(bits)),
                    Step::Abort(cid) => {
                        let there = before.outstanding.contains(&cid);
                        prop_assert_eq!(events.abort(cid), there);
                        None
                    }
                    Step::Clear => {
                        events.clear();
                        None
                    }
                };
                if let Some(Completion { cid, dw0 }) = completion {
                    prop_assert_eq!(before.outstanding.front(), Some(&cid));
                    let kind = AsyncEvent::from_dw0(dw0).kind;
                    prop_assert!(before.unread.iter().all(|event| event.kind != kind));
                }
                prop_assert!(events.outstanding.len() <= MAX_EVENT_REQUESTS);
                prop_assert!(events.pending.len() <= MAX_PENDING);
                prop_assert!(events.unread.len() <= 4);
                let masked = |event: &AsyncEvent| {
                    events.unread.iter().any(|other| other.kind == event.kind)
                };
                prop_assert!(events.outstanding.is_empty() || events.pending.iter().all(masked));
            }
        }
    }

    #[test]
    fn events_are_limited_to_one_per_minute_and_namespace() {
        let (mut limit, start) = (RateLimit::default(), Instant::now());
        let mut at = |nsid, seconds| limit.allows(nsid, start + Duration::from_secs(seconds));
        let allowed: Vec<u64> = (0..200).filter(|second| at(1, *second)).collect();
        assert_eq!(allowed, [0, 60, 120, 180]);
        assert!(at(2, 199) && !at(2, 200));
        // `now` may be before the last event, because threads read the clock before they call
        // `allows`. Then no event is allowed.
        assert!(!at(1, 0));
    }
}
