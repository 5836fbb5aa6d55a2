//! Persistent Event log page: history of the controller across resets, upgrades and crashes. Base
//! 2.1, 5.1.12.1.14.
//!
//! A host reads the page in a reporting context, which is a snapshot of the log. All parts that the
//! host reads are therefore consistent, even if events are added meanwhile. The total size of
//! events is limited, and the oldest events are dropped first.

use super::{FIRMWARE_REVISION, PELS};
use crate::config::PCI_VENDOR_ID;
use crate::saved::SavedEventLog;
use shadowbell_spec::admin::GetLogPage;
use shadowbell_spec::log::persistent_event::{
    PersistentEvent, PersistentEventLog, ReportingContext, ResetInformation, SanitizeCompletion,
    SanitizeStart, TimestampChange, VendorEvent, action, event_type,
};
use shadowbell_spec::log::{SanitizeLog, SmartHealth, lid};
use shadowbell_spec::status::Status;
use shadowbell_state::Bytes;
use std::collections::VecDeque;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Maximum total size of the events in bytes. The limit is small because every checkpoint of the
/// controller contains the events.
const MAX_BYTES: usize = 8 << 10;
/// Interval of SMART / Health snapshots. At least one per 24 hours is required.
const SNAPSHOT_EVERY: Duration = Duration::from_secs(23 * 3600);
/// Number of bytes that [`Action::EstablishAndHeader`](action::ESTABLISH_AND_HEADER) returns.
const HEADER: usize = size_of::<PersistentEventLog>();
const _: () = assert!(HEADER + MAX_BYTES <= (PELS as usize) << 16);

/// Supported event types.
const TYPES: [u8; 7] = [
    event_type::SMART,
    event_type::TIMESTAMP_CHANGE,
    event_type::POWER_ON_OR_RESET,
    event_type::SANITIZE_START,
    event_type::SANITIZE_COMPLETION,
    event_type::TELEMETRY_CREATED,
    event_type::VENDOR,
];

/// Code and name of a vendor-specific event.
pub(crate) type VendorEventCode = (u16, &'static str);
/// Vendor-specific event: recovery by the next process after a crash.
pub(crate) const RECOVERED: VendorEventCode = (1, "recovered");
/// Vendor-specific event: fatal state until a reset.
pub(crate) const FATAL: VendorEventCode = (2, "fatal");
/// Vendor-specific event: move to a dedicated I/O thread.
pub(crate) const ISOLATED: VendorEventCode = (3, "isolated");

/// Controller identifier, timestamp, age and power cycles at the time of an event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EventContext {
    /// Identifier of the controller to which the event belongs.
    pub(crate) cntlid: u16,
    pub(crate) timestamp: u64,
    pub(crate) powered: Duration,
    pub(crate) power_cycles: u64,
}

/// Serial number, model number and subsystem NQN in the log header.
pub(crate) struct Names {
    pub(crate) sn: [u8; 20],
    pub(crate) mn: [u8; 40],
    pub(crate) subnqn: [u8; 256],
}

/// Persistent event log.
#[derive(Debug, Default)]
pub(crate) struct EventLog {
    /// Events with their headers, oldest first.
    events: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Log page at the time when the reporting context was established.
    context: Option<Vec<u8>>,
    /// Number of established contexts.
    generation: u16,
    snapshot_at: Option<Instant>,
}

impl EventLog {
    fn push(&mut self, event: u8, at: &EventContext, parts: &[&[u8]]) {
        let data: usize = parts.iter().map(|part| part.len()).sum();
        let head = PersistentEvent {
            event,
            revision: 1,
            ehl: PersistentEvent::EHL,
            cntlid: at.cntlid.into(),
            timestamp: at.timestamp.into(),
            el: (data as u16).into(),
            ..PersistentEvent::default()
        };
        let mut all = head.as_bytes().to_vec();
        parts.iter().for_each(|part| all.extend_from_slice(part));
        self.bytes += all.len();
        self.events.push_back(all);
        while self.bytes > MAX_BYTES
            && let Some(oldest) = self.events.pop_front()
        {
            self.bytes -= oldest.len();
        }
    }

    /// Adds a Power-on or Reset event.
    pub(crate) fn enabled(&mut self, at: &EventContext) {
        let information = ResetInformation {
            cntlid: at.cntlid.into(),
            power_cycle: u32::try_from(at.power_cycles).unwrap_or(u32::MAX).into(),
            power_on_ms: (at.powered.as_millis() as u64).into(),
            timestamp: at.timestamp.into(),
            ..ResetInformation::default()
        };
        let parts = [&FIRMWARE_REVISION[..], information.as_bytes()];
        self.push(event_type::POWER_ON_OR_RESET, at, &parts);
    }

    /// Adds a Timestamp Change event. `previous` is the timestamp before the change.
    pub(crate) fn timestamp_changed(
        &mut self,
        at: &EventContext,
        previous: u64,
        since_reset: Duration,
    ) {
        let change = TimestampChange {
            previous: previous.into(),
            since_reset_ms: (since_reset.as_millis() as u64).into(),
        };
        self.push(event_type::TIMESTAMP_CHANGE, at, &[change.as_bytes()]);
    }

    /// Adds a Telemetry Log Create event with the header of the telemetry log page.
    pub(crate) fn telemetry_created(&mut self, at: &EventContext, header: &[u8]) {
        self.push(event_type::TELEMETRY_CREATED, at, &[header]);
    }

    /// Adds a Sanitize Start event. `dwords` are dwords 10 and 11 of the command.
    pub(crate) fn sanitize_started(&mut self, at: &EventContext, sanicap: u32, dwords: (u32, u32)) {
        let (cdw10, cdw11) = (dwords.0.into(), dwords.1.into());
        let start = SanitizeStart { sanicap: sanicap.into(), cdw10, cdw11 };
        self.push(event_type::SANITIZE_START, at, &[start.as_bytes()]);
    }

    /// Adds a Sanitize Completion event.
    pub(crate) fn sanitize_ended(&mut self, at: &EventContext, log: &SanitizeLog) {
        let completion = SanitizeCompletion {
            sprog: log.sprog.into(),
            sstat: log.sstat.into_bits().into(),
            ..SanitizeCompletion::default()
        };
        self.push(event_type::SANITIZE_COMPLETION, at, &[completion.as_bytes()]);
    }

    /// Adds a vendor-specific event with a description.
    pub(crate) fn add_vendor_event(
        &mut self,
        at: &EventContext,
        (code, name): VendorEventCode,
        text: &str,
    ) {
        let text = &text.as_bytes()[..text.len().min(200)];
        let head = |data_type, len: usize| VendorEvent {
            code: code.into(),
            data_type,
            uuid: 0,
            len: (len as u16).into(),
        };
        let (first, second) =
            (head(VendorEvent::NAME, name.len()), head(VendorEvent::ASCII, text.len()));
        let parts = [first.as_bytes(), name.as_bytes(), second.as_bytes(), text];
        self.push(event_type::VENDOR, at, &parts);
    }

    /// True if a SMART / Health snapshot is due.
    pub(crate) fn wants_snapshot(&self, now: Instant) -> bool {
        self.snapshot_at.is_none_or(|at| now.saturating_duration_since(at) >= SNAPSHOT_EVERY)
    }

    /// Due time of the next SMART / Health snapshot, if there was one before.
    pub(crate) fn snapshot_due(&self) -> Option<Instant> {
        self.snapshot_at.map(|at| at + SNAPSHOT_EVERY)
    }

    /// Adds a SMART / Health Log Snapshot event.
    pub(crate) fn snapshot(&mut self, at: &EventContext, health: &SmartHealth, now: Instant) {
        self.snapshot_at = Some(now);
        self.push(event_type::SMART, at, &[health.as_bytes()]);
    }

    /// Number of events.
    pub(crate) fn len(&self) -> usize {
        self.events.len()
    }

    /// Executes Get Log Page. Returns the whole page or its header, depending on the action.
    ///
    /// # Errors
    /// The completion status of the command.
    pub(crate) fn read(
        &mut self,
        command: &GetLogPage,
        names: &Names,
        at: &EventContext,
    ) -> Result<Vec<u8>, Status> {
        match command.lsp & 0b11 {
            action::READ => {
                let context = self.context.as_ref();
                Ok(context.ok_or(Status::COMMAND_SEQUENCE_ERROR.with_dnr())?.clone())
            }
            action::ESTABLISH if self.context.is_some() => {
                Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr())
            }
            action::ESTABLISH => Ok(self.establish(names, at)),
            action::RELEASE => {
                self.context = None;
                Ok(Vec::new())
            }
            _ => {
                let mut page = match &self.context {
                    // The header of an existing context reports that the context exists.
                    Some(context) => context.clone(),
                    None => self.establish(names, at),
                };
                page.truncate(HEADER);
                Ok(page)
            }
        }
    }

    fn establish(&mut self, names: &Names, at: &EventContext) -> Vec<u8> {
        self.generation = self.generation.wrapping_add(1);
        let mut head = PersistentEventLog {
            lid: lid::PERSISTENT_EVENTS,
            tnev: (self.events.len() as u32).into(),
            tll: ((HEADER + self.bytes) as u64).into(),
            lrev: PersistentEventLog::REVISION,
            lhl: PersistentEventLog::LHL.into(),
            timestamp: at.timestamp.into(),
            poh: u128::from(at.powered.as_secs() / 3600).into(),
            pcc: at.power_cycles.into(),
            vid: PCI_VENDOR_ID.into(),
            ssvid: PCI_VENDOR_ID.into(),
            sn: names.sn,
            mn: names.mn,
            subnqn: names.subnqn,
            generation: self.generation.into(),
            ..PersistentEventLog::default()
        };
        for event in TYPES {
            head.supported[usize::from(event / 8)] |= 1 << (event % 8);
        }
        let mut established = head.as_bytes().to_vec();
        // Newest event first.
        established.extend(self.events.iter().rev().flatten());
        // Header for later reads of the context, with the bit "reporting context exists" set.
        head.rci = ReportingContext::new().with_exists(true).into_bits().to_le_bytes();
        let mut context = established.clone();
        context[..HEADER].copy_from_slice(head.as_bytes());
        self.context = Some(context);
        established
    }

    pub(crate) fn save(&self) -> SavedEventLog {
        let now = Instant::now();
        SavedEventLog {
            events: self.events.iter().map(|event| Bytes(event.clone())).collect(),
            context: self.context.as_ref().map(|context| Bytes(context.clone())),
            generation: self.generation,
            snapshot_ms: self
                .snapshot_at
                .map(|at| now.saturating_duration_since(at).as_millis() as u64),
        }
    }

    /// Restores a snapshot. Invalid events are dropped.
    pub(crate) fn restore(saved: &SavedEventLog) -> Self {
        let mut log = Self { generation: saved.generation, ..Self::default() };
        for Bytes(event) in &saved.events {
            let is_whole = PersistentEvent::read_from_prefix(event).is_ok_and(|(head, data)| {
                usize::from(head.el.get()) == data.len() && TYPES.contains(&head.event)
            });
            if is_whole && log.bytes + event.len() <= MAX_BYTES {
                log.bytes += event.len();
                log.events.push_back(event.clone());
            }
        }
        let context = saved.context.as_ref().map(|context| context.0.clone());
        log.context = context.filter(|page| (HEADER..=HEADER + MAX_BYTES).contains(&page.len()));
        let ago = |ms| Instant::now().checked_sub(Duration::from_millis(ms));
        log.snapshot_at = saved.snapshot_ms.and_then(ago);
        log
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: EventContext = EventContext {
        cntlid: 5,
        timestamp: 77,
        powered: Duration::from_secs(7200),
        power_cycles: 3,
    };
    const NAMES: Names = Names { sn: [b'S'; 20], mn: [b'M'; 40], subnqn: [b'N'; 256] };

    fn ask(log: &mut EventLog, lsp: u8) -> Result<Vec<u8>, Status> {
        let command = GetLogPage { lid: lid::PERSISTENT_EVENTS, lsp, ..GetLogPage::default() };
        log.read(&command, &NAMES, &AT)
    }

    /// Decodes type, revision and data of each event of a page.
    fn events(page: &[u8]) -> Vec<(u8, u8, Vec<u8>)> {
        let (head, mut rest) = PersistentEventLog::read_from_prefix(page).unwrap();
        assert_eq!((head.tll.get(), head.lhl.get()), (page.len() as u64, 492));
        let mut all = Vec::new();
        while let Ok((event, data)) = PersistentEvent::read_from_prefix(rest) {
            assert_eq!((event.ehl, event.timestamp.get(), event.vsil.get()), (21, 77, 0));
            assert_eq!(event.cntlid.get(), 5);
            let (data, next) = data.split_at(event.el.get().into());
            all.push((event.event, event.revision, data.to_vec()));
            rest = next;
        }
        assert_eq!((all.len(), rest.len()), (head.tnev.get() as usize, 0));
        all
    }

    #[test]
    fn a_reporting_context_is_a_snapshot_of_the_event_log() {
        let mut log = EventLog::default();
        let error = Status::COMMAND_SEQUENCE_ERROR;
        assert_eq!(ask(&mut log, action::READ).unwrap_err().code(), error);
        log.enabled(&AT);
        log.timestamp_changed(&AT, 12, Duration::from_secs(1));
        let page = ask(&mut log, action::ESTABLISH).unwrap();
        let (head, _) = PersistentEventLog::read_from_prefix(&page).unwrap();
        assert_eq!((head.lid, head.generation.get(), head.context().exists()), (13, 1, false));
        assert_eq!((head.poh.get(), head.pcc.get(), head.sn), (2, 3, [b'S'; 20]));
        assert_eq!(head.supported[0], 0b0001_1010);
        assert_eq!((head.supported[1], head.supported[27]), (0b1_0110, 1 << 6));
        let all = events(&page);
        assert_eq!([&all[0], &all[1]].map(|event| (event.0, event.1)), [(3, 1), (4, 1)]);
        let change = TimestampChange::read_from_bytes(&all[0].2).unwrap();
        assert_eq!((change.previous.get(), change.since_reset_ms.get()), (12, 1000));
        let (revision, information) = all[1].2.split_at(8);
        assert_eq!(revision, FIRMWARE_REVISION);
        let information = ResetInformation::read_from_bytes(information).unwrap();
        assert_eq!((information.cntlid.get(), information.power_on_ms.get()), (5, 7_200_000));
        // An event after the context was established is only in the next context.
        log.add_vendor_event(&AT, RECOVERED, "by another process");
        assert_eq!(ask(&mut log, action::ESTABLISH).unwrap_err().code(), error);
        let read = ask(&mut log, action::READ).unwrap();
        assert_eq!(events(&read), all);
        let (head, _) = PersistentEventLog::read_from_prefix(&read).unwrap();
        assert!(head.context().exists());
        assert_eq!(ask(&mut log, action::ESTABLISH_AND_HEADER).unwrap(), read[..512]);
        let mut log = EventLog::restore(&log.save());
        assert_eq!(ask(&mut log, action::READ).unwrap(), read);
        // Releasing a context that does not exist is no error.
        (0..2).for_each(|_| assert_eq!(ask(&mut log, action::RELEASE), Ok(vec![])));
        assert_eq!(ask(&mut log, action::READ).unwrap_err().code(), error);
        let head = ask(&mut log, action::ESTABLISH_AND_HEADER).unwrap();
        assert_eq!(head.len(), 512);
        let page = ask(&mut log, action::READ).unwrap();
        let (event, _, data) = &events(&page)[0];
        assert_eq!((*event, &data[..6]), (0xde, &[1, 0, 1, 0, 9, 0][..]));
        assert_eq!(&data[6..15], b"recovered");
    }

    #[test]
    fn the_oldest_events_make_room() {
        let mut log = EventLog::default();
        let now = Instant::now();
        assert!(log.wants_snapshot(now));
        log.snapshot(&AT, &SmartHealth::default(), now);
        assert!(!log.wants_snapshot(now) && log.wants_snapshot(now + SNAPSHOT_EVERY));
        (0..10_000).for_each(|_| log.enabled(&AT));
        assert_eq!(log.len(), MAX_BYTES / 68);
        let page = ask(&mut log, action::ESTABLISH).unwrap();
        assert_eq!(events(&page).len(), log.len());
        let mut saved = log.save();
        saved.events.push(Bytes(vec![0; 10]));
        saved.events.extend(saved.events.clone());
        let restored = EventLog::restore(&saved);
        assert_eq!((restored.len(), restored.bytes), (log.len(), log.bytes));
    }
}
