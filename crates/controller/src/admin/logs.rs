//! Get Log Page: what happened to the controller, and what it supports. Base 2.1, 5.1.12.

use super::features;
use super::limits::{ERROR_LOG_ENTRIES, FIRMWARE_REVISION, TEMPERATURE};
use super::sanitize;
use crate::pool::PoolState;
use crate::saved::SavedErrors;
use crate::uncorrectable::Uncorrectable;
use shadowbell_spec::admin::GetLogPage;
use shadowbell_spec::identify::csi;
use shadowbell_spec::log::{
    Afi, ChangedNamespaces, CommandEffects, CommandsSupportedEffects, CriticalWarning,
    ErrorLogEntry, FeaturesSupportedEffects, FirmwareSlot, LogPageSupport, ParameterLocation,
    SelfTestLog, SmartHealth, SupportedLogPages, TELEMETRY_BLOCK, lid,
};
use shadowbell_spec::opcode::{AdminOpcode, NvmOpcode};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// An error that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ErrorRecord {
    /// Submission queue identifier; FFFFh if no command is to blame.
    pub(crate) sqid: u16,
    /// Command identifier; FFFFh if no command is to blame.
    pub(crate) cid: u16,
    /// The status that the command completed with.
    pub(crate) status: Status,
    /// The namespace, if it has to do with one.
    pub(crate) nsid: u32,
    /// The first logical block with the error, if it has to do with one.
    pub(crate) lba: u64,
}

/// Statuses that are counted, at most: a disk behind a device may have others than ours.
const MOST_KINDS: usize = 64;

/// The newest errors, and how many there ever were.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ErrorLog {
    /// The newest first.
    entries: VecDeque<ErrorLogEntry>,
    count: u64,
    /// How many there were of each status.
    kinds: BTreeMap<u16, u64>,
}

impl ErrorLog {
    /// Adds an error, which may push the oldest one out.
    pub(crate) fn push(&mut self, record: ErrorRecord) {
        self.count = self.count.saturating_add(1);
        let status = record.status.code().bits();
        if self.kinds.contains_key(&status) || self.kinds.len() < MOST_KINDS {
            *self.kinds.entry(status).or_default() += 1;
        }
        self.entries.truncate(ERROR_LOG_ENTRIES - 1);
        self.entries.push_front(ErrorLogEntry {
            error_count: self.count,
            sqid: record.sqid,
            cid: record.cid,
            // As in a completion queue entry, with the phase tag as zero.
            status: record.status.bits() << 1,
            parameter: ParameterLocation::NONE,
            lba: record.lba,
            nsid: record.nsid,
            ..ErrorLogEntry::default()
        });
    }

    /// So many errors happened of which nothing else is known.
    pub(crate) fn skip(&mut self, count: u64) {
        self.count = self.count.saturating_add(count);
    }

    /// How many errors there were since power on.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// How many there were of each status, without those of which nothing else is known.
    pub(crate) fn kinds(&self) -> impl Iterator<Item = (Status, u64)> {
        self.kinds.iter().map(|(status, count)| (Status::from_bits(*status), *count))
    }

    /// The entries, the newest first.
    pub(crate) fn entries(&self) -> impl Iterator<Item = &ErrorLogEntry> {
        self.entries.iter()
    }

    pub(crate) fn save(&self) -> SavedErrors {
        let entries = self.entries.iter().map(|entry| entry.as_bytes().to_vec()).collect();
        let kinds = self.kinds.iter().map(|(status, count)| (*status, *count)).collect();
        SavedErrors { entries, count: self.count, kinds }
    }

    /// The log as it was; nothing if an entry is none.
    pub(crate) fn restore(saved: &SavedErrors) -> Option<Self> {
        let entry = |bytes: &Vec<u8>| ErrorLogEntry::read_from_bytes(bytes).ok();
        let entries: Option<VecDeque<_>> = saved.entries.iter().map(entry).collect();
        let entries = entries.filter(|entries| entries.len() <= ERROR_LOG_ENTRIES)?;
        let kinds = saved.kinds.iter().copied().take(MOST_KINDS).collect();
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

/// What the SMART / Health Information log page tells, in the units in which it is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Health {
    /// Bytes that Read, Compare and Verify commands read. What a Copy command reads is no Data
    /// Unit Read (NVM Command Set 1.2, 1.4.2.7).
    pub(crate) bytes_read: u64,
    /// Bytes that Write and Copy commands wrote (NVM Command Set 1.2, 1.4.2.10).
    pub(crate) bytes_written: u64,
    /// Read, Compare and Copy commands completed (NVM Command Set 1.2, 1.4.2.8).
    pub(crate) host_reads: u64,
    /// Write and Copy commands completed.
    pub(crate) host_writes: u64,
    /// How long commands were being worked on.
    pub(crate) busy: Duration,
    /// How long the controller exists.
    pub(crate) powered: Duration,
    /// How often it was powered up.
    pub(crate) power_cycles: u64,
    /// How often power (or the host) went away without a shutdown notification.
    pub(crate) unsafe_shutdowns: u64,
    /// Commands that ended in an error of the medium.
    pub(crate) media_errors: u64,
    /// [`ErrorLog::count`].
    pub(crate) error_log_entries: u64,
    /// What is wrong.
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
        /// Thousands of 512-byte units, rounded up.
        fn data_units(bytes: u64) -> u128 {
            u128::from(bytes.div_ceil(512 * 1000))
        }
        SmartHealth {
            critical_warning: self.warning,
            temperature: self.temperature.into(),
            // Flash that wears out and spare blocks are the business of the storage below, unless
            // it has no block left.
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

/// The namespaces that changed since the host last read the Changed Attached Namespace List.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ChangedList(BTreeSet<u32>);

impl ChangedList {
    /// A namespace changed: to be called before the event is raised.
    pub(crate) fn insert(&mut self, nsid: u32) {
        self.0.insert(nsid);
    }

    pub(crate) fn save(&self) -> Vec<u32> {
        self.0.iter().copied().collect()
    }

    pub(crate) fn restore(saved: &[u32]) -> Self {
        Self(saved.iter().copied().collect())
    }

    /// A controller was reset: its host will identify everything anew.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

/// What the log pages are made of.
#[derive(Debug)]
pub(crate) struct LogContext<'a> {
    /// Error Information.
    pub(crate) errors: &'a ErrorLog,
    /// Blocks that are marked as uncorrectable.
    pub(crate) uncorrectable: &'a Uncorrectable,
    /// SMART / Health Information.
    pub(crate) health: &'a Health,
    /// Device Self-test.
    pub(crate) self_test: &'a SelfTestLog,
    /// Changed Attached Namespace List.
    pub(crate) changed: &'a mut ChangedList,
    /// What namespaces are made from, if a host can make some.
    pub(crate) pool: Option<&'a PoolState>,
    /// Whether Doorbell Buffer Config is offered.
    pub(crate) shadow_doorbells: bool,
    /// Whether a namespace has a volatile write cache.
    pub(crate) volatile_cache: bool,
    /// Whether the controller is one of several.
    pub(crate) is_shared: bool,
}

/// The log pages that the controller has.
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

/// What the host gets for a Get Log Page command: the part of the page that it asks for. If it asks
/// for more than there is, that is less than it asks for, and what follows in its buffer is
/// undefined (Base 2.1, 5.1.12): it stays as it was.
///
/// Reading the Changed Attached Namespace List without RAE clears it. Telling
/// [`AsyncEvents::log_read`](super::events::AsyncEvents::log_read) is left to the caller.
///
/// # Errors
/// The status that the command completes with.
pub(crate) fn read(
    cmd: &GetLogPage,
    nsid: u32,
    context: &mut LogContext<'_>,
) -> Result<Vec<u8>, Status> {
    let invalid_field = Status::INVALID_FIELD.with_dnr();
    if !PAGES.contains(&cmd.lid) {
        return Err(Status::INVALID_LOG_PAGE.with_dnr());
    }
    // All pages are of the controller or of the NVM subsystem (SMART / Health too: LPA bit 0).
    if nsid != 0 && nsid != NSID_ALL {
        return Err(invalid_field);
    }
    // No page has an index for its offset, and offsets are of dwords.
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

/// Checks what a command for a page that is [assembled elsewhere](is_elsewhere) has to keep to.
///
/// # Errors
/// Invalid Field in Command.
pub(crate) fn check(cmd: &GetLogPage, nsid: u32) -> Result<(), Status> {
    let is_telemetry = matches!(cmd.lid, lid::TELEMETRY_HOST | lid::TELEMETRY_CONTROLLER);
    // Telemetry is read in blocks (Base 2.1, 5.1.12.1.8).
    let block = if is_telemetry { TELEMETRY_BLOCK as u64 } else { 4 };
    let is_whole = cmd.lpo.is_multiple_of(block) && cmd.length().is_multiple_of(block);
    let is_ours = nsid == 0 || nsid == NSID_ALL;
    if cmd.ot || !is_whole || !is_ours {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    Ok(())
}

/// Whether a page is of those that commands change.
pub(crate) fn is_elsewhere(lid: u8) -> bool {
    matches!(lid, lid::TELEMETRY_HOST | lid::TELEMETRY_CONTROLLER | lid::PERSISTENT_EVENTS)
}

/// The part of a page that a command asks for.
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

/// The whole page.
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
            // Base 2.1, 5.1.12.1.6: the page of the I/O command set that CSI names.
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
        // There is no management interface, so no command of it is supported. The page must be
        // there because LPA bit 5 promises it together with the two above.
        lid::MI_COMMANDS_SUPPORTED_EFFECTS => vec![0; MI_PAGE_BYTES],
        _ => return Err(Status::INVALID_LOG_PAGE.with_dnr()),
    })
}

/// The size of the NVMe-MI Commands Supported and Effects log page.
const MI_PAGE_BYTES: usize = 4096;

fn supported_pages(has_pool: bool, is_shared: bool) -> SupportedLogPages {
    let mut page = SupportedLogPages::default();
    let own = PAGES.iter().filter(|lid| has_pool || **lid != lid::SANITIZE_STATUS);
    let shared = [lid::ANA, lid::RESERVATION_NOTIFICATION];
    for lid in own.chain(shared.iter().filter(|_| is_shared)) {
        // Of Persistent Event: Establish Context and Read 512 Bytes of Header is there.
        let lidsp = u16::from(*lid == lid::PERSISTENT_EVENTS);
        page.lids[usize::from(*lid)] = LogPageSupport::new().with_lsupp(true).with_lidsp(lidsp);
    }
    page
}

/// One slot, which holds what runs.
fn firmware_slot() -> FirmwareSlot {
    let mut page = FirmwareSlot { afi: Afi::new().with_active(1), ..FirmwareSlot::default() };
    page.frs[0] = FIRMWARE_REVISION;
    page
}

/// The admin commands that the controller has.
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

/// Those that there are with a pool of namespaces, and what else they change. What is outstanding
/// of a namespace that is formatted, and of all that are sanitized, comes to nothing.
const POOL_COMMANDS: &[(AdminOpcode, CommandEffects)] = &[
    (AdminOpcode::NamespaceManagement, CommandEffects::new().with_nic(true)),
    (AdminOpcode::NamespaceAttachment, CommandEffects::new().with_nic(true)),
    (AdminOpcode::FormatNvm, CommandEffects::new().with_lbcc(true).with_ncc(true).with_cse(1)),
    (AdminOpcode::Sanitize, CommandEffects::new().with_lbcc(true).with_cse(2)),
];

/// The I/O commands that the controller has, and whether they change what logical blocks contain.
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

/// The I/O commands of a controller that is one of several.
const RESERVATIONS: &[(NvmOpcode, bool)] = &[
    (NvmOpcode::ReservationRegister, false),
    (NvmOpcode::ReservationReport, false),
    (NvmOpcode::ReservationAcquire, false),
    (NvmOpcode::ReservationRelease, false),
];

/// The commands for zoned namespaces, instead of those for others.
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
    // The Command Scope stays "not reported": Linux takes an I/O command with any effect that it
    // does not know for a command to be serialised, and warns of "unusual effects".
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

#[cfg(test)]
mod tests;
