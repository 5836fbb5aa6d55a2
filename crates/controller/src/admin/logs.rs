//! Get Log Page: errors, health, changes, supported commands, ANA states and reservation
//! notifications. Base 2.1, 5.1.12; Asymmetric Namespace Access also 8.1.1; Reservation
//! Notification Mask 5.1.25.

use super::{ERROR_LOG_ENTRIES, FIRMWARE_REVISION, TEMPERATURE, features, sanitize};
use crate::pool::PoolState;
use crate::saved::{SavedAna, SavedErrors, SavedSharing};
use crate::uncorrectable::Uncorrectable;
use shadowbell_spec::admin::GetLogPage;
use shadowbell_spec::identify::csi;
use shadowbell_spec::log::{
    Afi, AnaGroup, AnaLog, AnaState, ChangedNamespaces, CommandEffects, CommandsSupportedEffects,
    CriticalWarning, ErrorLogEntry, FeaturesSupportedEffects, FirmwareSlot, LogPageSupport,
    ParameterLocation, SelfTestLog, SmartHealth, SupportedLogPages, TELEMETRY_BLOCK, lid,
};
use shadowbell_spec::opcode::{AdminOpcode, NvmOpcode};
use shadowbell_spec::reservation::ReservationNotification;
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Error for the error log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ErrorRecord {
    /// Submission queue identifier; FFFFh if no command caused the error.
    pub(crate) sqid: u16,
    /// Command identifier; FFFFh if no command caused the error.
    pub(crate) cid: u16,
    /// Completion status.
    pub(crate) status: Status,
    /// NSID, if the error belongs to a namespace.
    pub(crate) nsid: u32,
    /// First logical block with the error, if known.
    pub(crate) lba: u64,
}

/// Maximum number of different statuses that are counted. The limit is necessary because a
/// passthrough disk may return arbitrary statuses.
const MAX_STATUSES: usize = 64;

/// Error Information log: newest errors and counters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ErrorLog {
    /// Entries of the log, newest first.
    entries: VecDeque<ErrorLogEntry>,
    count: u64,
    /// Number of errors by status.
    kinds: BTreeMap<u16, u64>,
}

impl ErrorLog {
    /// Adds an error. If the log is full, the oldest entry is dropped.
    pub(crate) fn push(&mut self, record: ErrorRecord) {
        self.count = self.count.saturating_add(1);
        let status = record.status.code().bits();
        if self.kinds.contains_key(&status) || self.kinds.len() < MAX_STATUSES {
            *self.kinds.entry(status).or_default() += 1;
        }
        self.entries.truncate(ERROR_LOG_ENTRIES - 1);
        self.entries.push_front(ErrorLogEntry {
            error_count: self.count,
            sqid: record.sqid,
            cid: record.cid,
            // Status as in a completion queue entry, with phase tag 0.
            status: record.status.bits() << 1,
            parameter: ParameterLocation::NONE,
            lba: record.lba,
            nsid: record.nsid,
            ..ErrorLogEntry::default()
        });
    }

    /// Counts errors that were discarded before they reached the log.
    pub(crate) fn skip(&mut self, count: u64) {
        self.count = self.count.saturating_add(count);
    }

    /// Number of errors since power on.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Number of errors by status, without [skipped](Self::skip) errors.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = (Status, u64)> {
        self.kinds.iter().map(|(status, count)| (Status::from_bits(*status), *count))
    }

    /// Entries, newest first.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &ErrorLogEntry> {
        self.entries.iter()
    }

    pub(crate) fn save(&self) -> SavedErrors {
        let entries = self.entries.iter().map(|entry| entry.as_bytes().to_vec()).collect();
        let kinds = self.kinds.iter().map(|(status, count)| (*status, *count)).collect();
        SavedErrors { entries, count: self.count, kinds }
    }

    /// Restores a snapshot; `None` if an entry is invalid.
    pub(crate) fn restore(saved: &SavedErrors) -> Option<Self> {
        let entry = |bytes: &Vec<u8>| ErrorLogEntry::read_from_bytes(bytes).ok();
        let entries: Option<VecDeque<_>> = saved.entries.iter().map(entry).collect();
        let entries = entries.filter(|entries| entries.len() <= ERROR_LOG_ENTRIES)?;
        let kinds = saved.kinds.iter().copied().take(MAX_STATUSES).collect();
        Some(Self { entries, count: saved.count, kinds })
    }

    fn page(&self) -> [ErrorLogEntry; ERROR_LOG_ENTRIES] {
        let mut page = [ErrorLogEntry::default(); ERROR_LOG_ENTRIES];
        for (slot, entry) in page.iter_mut().zip(&self.entries) {
            *slot = *entry;
        }
        page
    }
}

/// Counters for the SMART / Health Information log page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Health {
    /// Bytes read by Read, Compare and Verify commands. Bytes read by Copy do not count as Data
    /// Units Read (NVM Command Set 1.2, 1.4.2.7).
    pub(crate) bytes_read: u64,
    /// Bytes written by Write and Copy commands (NVM Command Set 1.2, 1.4.2.10).
    pub(crate) bytes_written: u64,
    /// Completed Read, Compare and Copy commands (NVM Command Set 1.2, 1.4.2.8).
    pub(crate) host_reads: u64,
    /// Completed Write and Copy commands.
    pub(crate) host_writes: u64,
    /// Time during which commands were in flight.
    pub(crate) busy: Duration,
    /// Age of the controller.
    pub(crate) powered: Duration,
    /// Number of power cycles.
    pub(crate) power_cycles: u64,
    /// Number of times that power was lost, or the host disconnected, without a shutdown.
    pub(crate) unsafe_shutdowns: u64,
    /// Number of commands that ended in a media error.
    pub(crate) media_errors: u64,
    /// Number of error log entries: [`ErrorLog::count`].
    pub(crate) error_log_entries: u64,
    /// Critical warnings.
    pub(crate) warning: CriticalWarning,
    /// Composite temperature in kelvins.
    pub(crate) temperature: u16,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            bytes_read: 0,
            bytes_written: 0,
            host_reads: 0,
            host_writes: 0,
            busy: Duration::ZERO,
            powered: Duration::ZERO,
            power_cycles: 0,
            unsafe_shutdowns: 0,
            media_errors: 0,
            error_log_entries: 0,
            warning: CriticalWarning::new(),
            temperature: TEMPERATURE,
        }
    }
}

impl Health {
    pub(crate) fn page(&self) -> SmartHealth {
        /// Converts bytes to thousands of 512-byte units, rounded up.
        fn data_units(bytes: u64) -> u128 {
            u128::from(bytes.div_ceil(512 * 1000))
        }
        SmartHealth {
            critical_warning: self.warning,
            temperature: self.temperature.into(),
            // Wear and spare blocks are properties of the storage below the disk. They are not
            // emulated.
            available_spare: 100,
            available_spare_threshold: 10,
            percentage_used: 0,
            data_units_read: data_units(self.bytes_read).into(),
            data_units_written: data_units(self.bytes_written).into(),
            host_read_commands: u128::from(self.host_reads).into(),
            host_write_commands: u128::from(self.host_writes).into(),
            controller_busy_time: u128::from(self.busy.as_secs() / 60).into(),
            power_cycles: u128::from(self.power_cycles).into(),
            power_on_hours: u128::from(self.powered.as_secs() / 3600).into(),
            unsafe_shutdowns: u128::from(self.unsafe_shutdowns).into(),
            media_errors: u128::from(self.media_errors).into(),
            error_log_entries: u128::from(self.error_log_entries).into(),
            ..SmartHealth::default()
        }
    }
}

/// Namespaces that changed since the host last read the Changed Attached Namespace List.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangedList(BTreeSet<u32>);

impl ChangedList {
    /// Adds a changed namespace. Called before the event Namespace Attribute Changed is raised.
    pub(crate) fn insert(&mut self, nsid: u32) {
        self.0.insert(nsid);
    }

    pub(crate) fn save(&self) -> Vec<u32> {
        self.0.iter().copied().collect()
    }

    pub(crate) fn restore(saved: &[u32]) -> Self {
        Self(saved.iter().copied().collect())
    }

    /// Clears the list at a controller reset, after which the host identifies all namespaces.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// Sources of the log pages.
#[derive(Debug)]
pub(crate) struct LogContext<'a> {
    /// Error Information.
    pub(crate) errors: &'a ErrorLog,
    /// Blocks marked as uncorrectable.
    pub(crate) uncorrectable: &'a Uncorrectable,
    /// SMART / Health Information.
    pub(crate) health: &'a Health,
    /// Device Self-test.
    pub(crate) self_test: &'a SelfTestLog,
    /// Changed Attached Namespace List.
    pub(crate) changed: &'a mut ChangedList,
    /// Namespace pool, if the host can create namespaces.
    pub(crate) pool: Option<&'a PoolState>,
    /// True if Doorbell Buffer Config is supported.
    pub(crate) shadow_doorbells: bool,
    /// True if a namespace has a volatile write cache.
    pub(crate) volatile_cache: bool,
    /// True if the controller belongs to a subsystem of several controllers.
    pub(crate) is_shared: bool,
}

/// Supported log pages.
const PAGES: &[u8] = &[
    lid::SUPPORTED_LOG_PAGES,
    lid::ERROR_INFORMATION,
    lid::SMART_HEALTH,
    lid::FIRMWARE_SLOT,
    lid::CHANGED_ATTACHED_NAMESPACES,
    lid::COMMANDS_SUPPORTED_EFFECTS,
    lid::SELF_TEST,
    lid::TELEMETRY_HOST,
    lid::TELEMETRY_CONTROLLER,
    lid::PERSISTENT_EVENTS,
    lid::LBA_STATUS,
    lid::FEATURES_SUPPORTED_EFFECTS,
    lid::MI_COMMANDS_SUPPORTED_EFFECTS,
    lid::SANITIZE_STATUS,
];

/// Executes Get Log Page: returns the requested part of the page. If the page ends before the
/// requested length, the returned data are shorter, and the rest of the host's buffer stays
/// unchanged. The specification leaves the contents of that rest undefined (Base 2.1, 5.1.12).
///
/// Without RAE, a read of the Changed Attached Namespace List clears the list. The caller must then
/// call [`AsyncEvents::log_read`](super::events::AsyncEvents::log_read).
///
/// # Errors
/// The completion status of the command.
pub(crate) fn read(
    cmd: &GetLogPage,
    nsid: u32,
    context: &mut LogContext<'_>,
) -> Result<Vec<u8>, Status> {
    let invalid_field = Status::INVALID_FIELD.with_dnr();
    if !PAGES.contains(&cmd.lid) {
        return Err(Status::INVALID_LOG_PAGE.with_dnr());
    }
    // All pages have the scope of the controller or the subsystem, even SMART / Health, because LPA
    // bit 0 is clear.
    if nsid != 0 && nsid != NSID_ALL {
        return Err(invalid_field);
    }
    // No page supports index offsets, and byte offsets are multiples of a dword.
    if cmd.ot || !cmd.lpo.is_multiple_of(4) {
        return Err(invalid_field);
    }
    let page = page(cmd, context)?;
    let part = part(cmd, &page)?;
    if cmd.lid == lid::CHANGED_ATTACHED_NAMESPACES && !cmd.rae {
        context.changed.clear();
    }
    Ok(part)
}

/// Checks a Get Log Page command for a page that [`read`] does not build ([`is_elsewhere`]).
///
/// # Errors
/// Invalid Field in Command.
pub(crate) fn check(cmd: &GetLogPage, nsid: u32) -> Result<(), Status> {
    let is_telemetry = matches!(cmd.lid, lid::TELEMETRY_HOST | lid::TELEMETRY_CONTROLLER);
    // Telemetry is read in blocks of 512 bytes (Base 2.1, 5.1.12.1.8).
    let block = if is_telemetry { TELEMETRY_BLOCK as u64 } else { 4 };
    let is_whole = cmd.lpo.is_multiple_of(block) && cmd.length().is_multiple_of(block);
    let is_ours = nsid == 0 || nsid == NSID_ALL;
    if cmd.ot || !is_whole || !is_ours {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    Ok(())
}

/// True for pages that Get Log Page itself can change. [`read`] does not build these pages.
pub(crate) fn is_elsewhere(lid: u8) -> bool {
    matches!(lid, lid::TELEMETRY_HOST | lid::TELEMETRY_CONTROLLER | lid::PERSISTENT_EVENTS)
}

/// Requested part of a page.
///
/// # Errors
/// Invalid Field in Command.
pub(crate) fn part(cmd: &GetLogPage, page: &[u8]) -> Result<Vec<u8>, Status> {
    let start = usize::try_from(cmd.lpo).ok().filter(|start| *start <= page.len());
    let start = start.ok_or(Status::INVALID_FIELD.with_dnr())?;
    let length = usize::try_from(cmd.length()).unwrap_or(usize::MAX);
    let end = start.saturating_add(length).min(page.len());
    Ok(page.get(start..end).unwrap_or_default().to_vec())
}

/// Builds a whole page.
fn page(cmd: &GetLogPage, context: &LogContext<'_>) -> Result<Vec<u8>, Status> {
    Ok(match cmd.lid {
        lid::SUPPORTED_LOG_PAGES => {
            supported_pages(context.pool.is_some(), context.is_shared).as_bytes().to_vec()
        }
        lid::ERROR_INFORMATION => context.errors.page().as_bytes().to_vec(),
        lid::SMART_HEALTH => context.health.page().as_bytes().to_vec(),
        lid::FIRMWARE_SLOT => firmware_slot().as_bytes().to_vec(),
        lid::CHANGED_ATTACHED_NAMESPACES => {
            ChangedNamespaces::new(context.changed.0.iter().copied()).as_bytes().to_vec()
        }
        lid::COMMANDS_SUPPORTED_EFFECTS => {
            // Base 2.1, 5.1.12.1.6: CSI selects the I/O command set.
            let offers = (context.pool.is_some(), context.is_shared);
            let mut page = commands(context.shadow_doorbells, offers);
            match cmd.csi {
                csi::NVM => {}
                csi::ZONED => zoned_commands(&mut page),
                _ => return Err(Status::INVALID_FIELD.with_dnr()),
            }
            page.as_bytes().to_vec()
        }
        lid::SANITIZE_STATUS => match context.pool {
            Some(state) => sanitize::page(&state.sanitize).as_bytes().to_vec(),
            None => return Err(Status::INVALID_LOG_PAGE.with_dnr()),
        },
        lid::SELF_TEST => context.self_test.as_bytes().to_vec(),
        lid::LBA_STATUS => context.uncorrectable.page(),
        lid::FEATURES_SUPPORTED_EFFECTS => {
            let mut page = FeaturesSupportedEffects::default();
            for (fid, effects) in features::supported(context.volatile_cache, context.is_shared) {
                page.fids[usize::from(fid)] = effects;
            }
            page.as_bytes().to_vec()
        }
        // The controller has no management interface, so the page lists no commands. The page must
        // exist, because LPA bit 5 announces it together with the log pages of supported pages and
        // features.
        lid::MI_COMMANDS_SUPPORTED_EFFECTS => vec![0; MI_PAGE_BYTES],
        _ => return Err(Status::INVALID_LOG_PAGE.with_dnr()),
    })
}

/// Size of the NVMe-MI Commands Supported and Effects log page.
const MI_PAGE_BYTES: usize = 4096;

fn supported_pages(has_pool: bool, is_shared: bool) -> SupportedLogPages {
    let mut page = SupportedLogPages::default();
    let own = PAGES.iter().filter(|lid| has_pool || **lid != lid::SANITIZE_STATUS);
    let shared = [lid::ANA, lid::RESERVATION_NOTIFICATION];
    for lid in own.chain(shared.iter().filter(|_| is_shared)) {
        // Persistent Event supports Establish Context and Read 512 Bytes of Header.
        let lidsp = u16::from(*lid == lid::PERSISTENT_EVENTS);
        page.lids[usize::from(*lid)] = LogPageSupport::new().with_lsupp(true).with_lidsp(lidsp);
    }
    page
}

/// Firmware Slot Information with one slot.
fn firmware_slot() -> FirmwareSlot {
    let mut page = FirmwareSlot { afi: Afi::new().with_active(1), ..FirmwareSlot::default() };
    page.frs[0] = FIRMWARE_REVISION;
    page
}

/// Supported admin commands.
const ADMIN_COMMANDS: &[AdminOpcode] = &[
    AdminOpcode::DeleteIoSq,
    AdminOpcode::CreateIoSq,
    AdminOpcode::GetLogPage,
    AdminOpcode::DeleteIoCq,
    AdminOpcode::CreateIoCq,
    AdminOpcode::Identify,
    AdminOpcode::Abort,
    AdminOpcode::SetFeatures,
    AdminOpcode::GetFeatures,
    AdminOpcode::AsyncEventRequest,
    AdminOpcode::KeepAlive,
    AdminOpcode::GetLbaStatus,
    AdminOpcode::DeviceSelfTest,
];

/// Additional admin commands with a namespace pool, and their effects. The field Command Submission
/// and Execution (CSE) has two values here. 1, for Format NVM, means that no other command may be
/// outstanding on the namespace. 2, for Sanitize, means that no other command may be outstanding on
/// any namespace.
const POOL_COMMANDS: &[(AdminOpcode, CommandEffects)] = &[
    (AdminOpcode::NamespaceManagement, CommandEffects::new().with_nic(true)),
    (AdminOpcode::NamespaceAttachment, CommandEffects::new().with_nic(true)),
    (AdminOpcode::FormatNvm, CommandEffects::new().with_lbcc(true).with_ncc(true).with_cse(1)),
    (AdminOpcode::Sanitize, CommandEffects::new().with_lbcc(true).with_cse(2)),
];

/// Supported I/O commands, and whether they change the contents of logical blocks.
const IO_COMMANDS: &[(NvmOpcode, bool)] = &[
    (NvmOpcode::Flush, false),
    (NvmOpcode::Write, true),
    (NvmOpcode::WriteUncorrectable, true),
    (NvmOpcode::Read, false),
    (NvmOpcode::Compare, false),
    (NvmOpcode::WriteZeroes, true),
    (NvmOpcode::DatasetManagement, true),
    (NvmOpcode::Verify, false),
    (NvmOpcode::Copy, true),
];

/// Additional I/O commands of a controller in a subsystem.
const RESERVATIONS: &[(NvmOpcode, bool)] = &[
    (NvmOpcode::ReservationRegister, false),
    (NvmOpcode::ReservationReport, false),
    (NvmOpcode::ReservationAcquire, false),
    (NvmOpcode::ReservationRelease, false),
];

/// Adds the commands of the Zoned Namespace command set to the page.
fn zoned_commands(page: &mut CommandsSupportedEffects) {
    let supported = CommandEffects::new().with_csupp(true);
    for (opcode, effects) in [
        (NvmOpcode::WriteUncorrectable, CommandEffects::new()),
        (NvmOpcode::ZoneManagementSend, supported.with_lbcc(true)),
        (NvmOpcode::ZoneManagementReceive, supported),
        (NvmOpcode::ZoneAppend, supported.with_lbcc(true)),
    ] {
        page.io[usize::from(u8::from(opcode))] = effects;
    }
}

fn commands(
    shadow_doorbells: bool,
    (has_pool, is_shared): (bool, bool),
) -> CommandsSupportedEffects {
    let mut page = CommandsSupportedEffects::new_zeroed();
    // Command Scope stays "not reported": if an I/O command has an effect that Linux does not know,
    // Linux serializes the command and warns of "unusual effects".
    let supported = CommandEffects::new().with_csupp(true);
    let optional = shadow_doorbells.then_some(&AdminOpcode::DoorbellBufferConfig);
    for opcode in ADMIN_COMMANDS.iter().chain(optional) {
        page.admin[usize::from(u8::from(*opcode))] = supported;
    }
    for (opcode, effects) in POOL_COMMANDS.iter().filter(|_| has_pool) {
        page.admin[usize::from(u8::from(*opcode))] = effects.with_csupp(true);
    }
    let reservations = if is_shared { RESERVATIONS } else { &[] };
    for (opcode, changes) in IO_COMMANDS.iter().chain(reservations) {
        page.io[usize::from(u8::from(*opcode))] = supported.with_lbcc(*changes);
    }
    page
}

/// ANATT: maximum time in seconds that a group stays in the ANA Change state. Management software
/// sets the states and must observe this limit.
pub(crate) const TRANSITION_SECONDS: u8 = 60;

/// ANA state changes since the last Controller Level Reset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnaChanges {
    /// Change Count.
    count: u64,
    /// State of each group at the last `AnaChanges::review`, and the Change Count of the group's
    /// last state change.
    groups: BTreeMap<u32, (AnaState, u64)>,
}

impl AnaChanges {
    /// Compares the current states with the stored ones, and then stores the current ones. Returns
    /// true if a state has changed. The first state of a group does not count as a change.
    pub(crate) fn review(&mut self, states: impl Iterator<Item = (u32, AnaState)>) -> bool {
        let before = self.count;
        for (group, state) in states {
            let (known, changes) = self.groups.entry(group).or_insert((state, 0));
            if *known != state {
                // After an overflow the count continues with 1, because 0 means "no change".
                self.count = self.count.checked_add(1).unwrap_or(1);
                (*known, *changes) = (state, self.count);
            }
        }
        self.count != before
    }

    /// Asymmetric Namespace Access log page with the given groups and their namespaces.
    pub(crate) fn page(&self, namespaces: &BTreeMap<u32, Vec<u32>>, groups_only: bool) -> Vec<u8> {
        let group = |(id, nsids): (&u32, &Vec<u32>)| {
            let (state, changes) = self.groups.get(id).copied().unwrap_or_default();
            AnaGroup { id: *id, changes, state: Some(state), nsids: nsids.clone() }
        };
        let groups = namespaces.iter().map(group).collect();
        AnaLog { changes: self.count, groups }.encode(groups_only)
    }

    pub(crate) fn save(&self) -> SavedAna {
        let groups = self.groups.iter();
        let groups = groups.map(|(group, (state, changes))| (*group, *state as u8, *changes));
        SavedAna { count: self.count, groups: groups.collect() }
    }

    /// Restores a snapshot of [`save`](Self::save). Groups with an undefined state are dropped.
    pub(crate) fn restore(saved: &SavedAna) -> Self {
        let group = |&(group, state, changes): &(u32, u8, u64)| {
            Some((group, (AnaState::from_bits(state)?, changes)))
        };
        Self { count: saved.count, groups: saved.groups.iter().filter_map(group).collect() }
    }
}

/// Maximum number of unread notifications. Beyond it, the oldest notifications are dropped, and the
/// host sees a gap in the notification numbers.
const MAX_NOTICES: usize = 64;
/// Defined bits of the mask: one per notification type.
const MASK: u32 = 0b1110;

/// Reservation notifications for the host of a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReservationLog {
    /// Masked types by NSID: bit n for type n.
    masks: BTreeMap<u32, u32>,
    /// Notifications (number, type and NSID), oldest first.
    notices: VecDeque<(u64, u8, u32)>,
    /// Number of the last notification.
    last_number: u64,
}

impl ReservationLog {
    /// Adds a notification, unless its type is masked. Returns true if an event has to be raised.
    pub(crate) fn add_notification(&mut self, nsid: u32, kind: u8) -> bool {
        if self.mask(nsid) & 1 << kind != 0 {
            return false;
        }
        if self.notices.len() >= MAX_NOTICES {
            self.notices.pop_front();
        }
        // After an overflow the number continues with 1, because 0 means "no notification".
        self.last_number = self.last_number.checked_add(1).unwrap_or(1);
        self.notices.push_back((self.last_number, kind, nsid));
        true
    }

    /// Log page with the oldest notification.
    pub(crate) fn page(&self) -> Vec<u8> {
        let mut page = ReservationNotification::default();
        if let Some((count, kind, nsid)) = self.notices.front() {
            let left = self.notices.len() - 1;
            page.lpcount = *count;
            page.kind = *kind;
            page.available = left.min(255) as u8;
            page.nsid = *nsid;
        }
        page.as_bytes().to_vec()
    }

    /// Removes the oldest notification, because the host has read it.
    pub(crate) fn was_read(&mut self) {
        self.notices.pop_front();
    }

    /// Value of the Reservation Notification Mask feature.
    pub(crate) fn mask(&self, nsid: u32) -> u32 {
        self.masks.get(&nsid).copied().unwrap_or(0)
    }

    /// Sets the Reservation Notification Mask feature.
    pub(crate) fn set_mask(&mut self, nsid: u32, mask: u32) {
        self.masks.insert(nsid, mask & MASK);
    }

    /// Drops mask and notifications of namespace `nsid`, which was replaced or removed.
    pub(crate) fn clear_namespace(&mut self, nsid: u32) {
        self.masks.remove(&nsid);
        self.notices.retain(|(_, _, of)| *of != nsid);
    }

    /// Snapshot of masks and notifications, completed by the Host Identifier `host` and the ANA
    /// states `ana`.
    pub(crate) fn save(&self, host: Vec<u8>, ana: SavedAna) -> SavedSharing {
        let masks = self.masks.iter().map(|(nsid, mask)| (*nsid, *mask)).collect();
        let notices = self.notices.iter().copied().collect();
        SavedSharing { host, masks, notices, last_notice: self.last_number, ana }
    }

    /// Restores a snapshot of [`save`](Self::save).
    pub(crate) fn restore(saved: &SavedSharing) -> Self {
        let SavedSharing { masks, notices, last_notice, .. } = saved;
        let notices = notices.iter().copied().take(MAX_NOTICES).collect();
        Self { masks: masks.iter().copied().collect(), notices, last_number: *last_notice }
    }
}

#[cfg(test)]
mod tests;
