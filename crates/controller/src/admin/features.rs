//! Get Features and Set Features, with Host Behavior Support, Host Identifier and the Keep Alive
//! Timer. Base 2.1, 5.1.11 and 5.1.25.
//!
//! # Keep Alive Timer
//!
//! Detects a dead host. Base 2.1, 3.9 "Keep Alive".
//!
//! The timer is optional for PCIe controllers, and no known host enables it by default. A host that
//! enables it sends Keep Alive commands periodically. If none arrives within the timeout, the
//! controller adds an error log entry, enters a fatal state (CSTS.CFS) and stops.

use super::WARNING_TEMPERATURE;
use crate::saved::SavedFeatures;
use shadowbell_spec::admin::{GetFeatures, SetFeatures};
use shadowbell_spec::feature::{
    Arbitration, AsyncEventConfig, Capabilities, ErrorRecovery, HostBehaviorSupport,
    InterruptCoalescing, InterruptVectorConfiguration, IoCommandSetProfile, NumberOfQueues,
    PowerManagement, Select, TemperatureThreshold, Timestamp, VolatileWriteCache, WriteAtomicity,
    fid,
};
use shadowbell_spec::log::{CommandEffects, FeatureEffects};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Events that a host may enable: all critical warnings, the notices in OAES of Identify
/// Controller, and telemetry notices. ANA notices are added if the controller reports ANA.
const EVENTS: AsyncEventConfig =
    AsyncEventConfig::new().with_smart(0xff).with_nan(true).with_tln(true);
/// Default of Arbitration: no burst limit.
const NO_BURST_LIMIT: Arbitration = Arbitration::new().with_ab(7);

/// Reserved bits of the Arbitration feature.
const RESERVED_BURST: u32 = 0xf8;

/// Controller state that limits feature values, at the time of the command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Number of supported I/O queue pairs, at least 1.
    pub(crate) io_queues: u16,
    /// True if an I/O queue exists: Number of Queues is then fixed.
    pub(crate) queues_exist: bool,
    /// Number of interrupt vectors.
    pub(crate) vectors: u16,
    /// NN of Identify Controller: the highest valid NSID.
    pub(crate) namespaces: u32,
    /// True if the namespace with the command's NSID is active. Has no meaning for an invalid NSID.
    pub(crate) active: bool,
    /// True if a volatile write cache is present (VWC of Identify Controller).
    pub(crate) volatile_cache: bool,
    /// True if the controller belongs to a subsystem of several controllers.
    pub(crate) is_shared: bool,
}

/// Action of the control plane after a feature was set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// No action.
    None,
    /// Allow this many I/O queues of each kind, at least 1.
    NumberOfQueues {
        /// Number of submission queues: valid identifiers are 1 to this number.
        submission: u16,
        /// Number of completion queues: valid identifiers are 1 to this number.
        completion: u16,
    },
    /// Coalesce interrupts.
    InterruptCoalescing {
        /// Aggregation Threshold: number of completions after which an interrupt is no longer
        /// delayed, 0's based.
        threshold: u8,
        /// Aggregation Time: maximum delay of an interrupt in units of 100 microseconds; 0 for no
        /// delay.
        time: u8,
    },
    /// Disable or enable coalescing for one vector.
    InterruptVector {
        /// Interrupt vector.
        vector: u16,
        /// True if interrupts of this vector are never delayed.
        coalescing_disabled: bool,
    },
    /// Enable or disable the volatile write cache. If disabled, each write has to be on stable
    /// storage before it completes, as with FUA.
    VolatileWriteCache(bool),
    /// Enabled events, for [`AsyncEvents::configure`](super::events::AsyncEvents).
    AsyncEventConfig(AsyncEventConfig),
    /// Enabled descriptor formats of Copy: bit n for format n.
    CopyFormats(u16),
    /// Keep Alive Timeout in milliseconds; 0 disables the timer.
    KeepAlive(u32),
    /// Check the temperature against the changed threshold.
    TemperatureThreshold,
}

/// Result of Set Features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Set {
    /// Dword 0 of the completion.
    pub(crate) dw0: u32,
    /// Action of the control plane.
    pub(crate) effect: Effect,
}

/// Result of Get Features.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Get {
    /// Dword 0 of the completion.
    pub(crate) dw0: u32,
    /// Data structure for the host's buffer, if the value of the feature does not fit into dword 0.
    pub(crate) data: Option<Vec<u8>>,
}

/// Scope of a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    Controller,
    Namespace,
}

/// Supported features. All are changeable, none is saveable.
const FEATURES: &[(u8, Scope)] = &[
    (fid::ARBITRATION, Scope::Controller),
    (fid::POWER_MANAGEMENT, Scope::Controller),
    (fid::TEMPERATURE_THRESHOLD, Scope::Controller),
    (fid::ERROR_RECOVERY, Scope::Namespace),
    (fid::VOLATILE_WRITE_CACHE, Scope::Controller),
    (fid::NUMBER_OF_QUEUES, Scope::Controller),
    (fid::INTERRUPT_COALESCING, Scope::Controller),
    (fid::INTERRUPT_VECTOR_CONFIGURATION, Scope::Controller),
    (fid::WRITE_ATOMICITY, Scope::Controller),
    (fid::ASYNC_EVENT_CONFIGURATION, Scope::Controller),
    (fid::TIMESTAMP, Scope::Controller),
    (fid::KEEP_ALIVE_TIMER, Scope::Controller),
    (fid::HOST_BEHAVIOR_SUPPORT, Scope::Controller),
    (fid::IO_COMMAND_SET_PROFILE, Scope::Controller),
];

/// Additional features of a controller in a subsystem, implemented in
/// `control/shared_features.rs`.
const SHARED: &[(u8, Scope)] = &[
    (fid::HOST_IDENTIFIER, Scope::Controller),
    (fid::RESERVATION_NOTIFICATION_MASK, Scope::Namespace),
    (fid::RESERVATION_PERSISTENCE, Scope::Namespace),
];

/// Scope of a feature.
///
/// # Errors
/// Invalid Field in Command if the feature is not supported.
fn scope_of(fid: u8, volatile_cache: bool) -> Result<Scope, Status> {
    // Base 2.1, "Volatile Write Cache": without a volatile write cache the command fails.
    if fid == fid::VOLATILE_WRITE_CACHE && !volatile_cache {
        return Err(invalid_field());
    }
    let found = FEATURES.iter().find(|(supported, _)| *supported == fid);
    found.map(|(_, scope)| *scope).ok_or(invalid_field())
}

/// Supported features for log page 12h (Feature Identifiers Supported and Effects).
pub(crate) fn supported(
    volatile_cache: bool,
    is_shared: bool,
) -> impl Iterator<Item = (u8, FeatureEffects)> {
    let shared = if is_shared { SHARED } else { &[] };
    let own = FEATURES.iter().filter(move |(fid, _)| scope_of(*fid, volatile_cache).is_ok());
    own.chain(shared).map(|(fid, scope)| {
        let scope = match scope {
            Scope::Controller => CommandEffects::SCOPE_CONTROLLER,
            Scope::Namespace => CommandEffects::SCOPE_NAMESPACE,
        };
        (*fid, FeatureEffects::new().with_fsupp(true).with_fsp(scope))
    })
}

/// Number of bytes that Set Features of a feature transfers from the host.
pub(crate) fn data_length(fid: u8) -> usize {
    match fid {
        fid::TIMESTAMP => size_of::<Timestamp>(),
        fid::HOST_BEHAVIOR_SUPPORT => size_of::<HostBehaviorSupport>(),
        _ => 0,
    }
}

/// Current feature values of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Features {
    arbitration: Arbitration,
    power: PowerManagement,
    over_temperature: u16,
    under_temperature: u16,
    /// Time Limited Error Recovery by NSID, where set.
    error_recovery: BTreeMap<u32, u16>,
    write_cache: bool,
    /// Number of Queues; `None` until it is set, which means all supported queues.
    queues: Option<NumberOfQueues>,
    /// Interrupt Coalescing; `None` until it is set, which means adaptive moderation.
    coalescing: Option<InterruptCoalescing>,
    /// Vectors with coalescing disabled.
    coalescing_disabled: BTreeSet<u16>,
    write_atomicity: WriteAtomicity,
    events: AsyncEventConfig,
    clock: Clock,
    /// Keep Alive Timeout in milliseconds; 0 if disabled.
    keep_alive: u32,
    /// Advanced Command Retry Enable: the host supports the status Command Interrupted.
    supports_interrupted: bool,
    /// Copy Descriptor Formats Enable: bit n enables format n. Only formats with a source NSID in
    /// each range need to be enabled.
    copy_formats: u16,
}

/// Timestamp feature: a clock that the host sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Clock {
    /// Timestamp in milliseconds at the time `at`.
    millis: u64,
    /// Value of [`now_ms`] when the timestamp was `millis`.
    at: u64,
    /// True if the host has set the timestamp.
    set: bool,
}

impl Features {
    /// Default values at power on.
    pub(crate) fn new() -> Self {
        Self::at_reset(now_ms())
    }

    fn at_reset(now_ms: u64) -> Self {
        Self {
            arbitration: NO_BURST_LIMIT,
            power: PowerManagement::new(),
            over_temperature: WARNING_TEMPERATURE,
            under_temperature: 0,
            error_recovery: BTreeMap::new(),
            write_cache: true,
            queues: None,
            coalescing: None,
            coalescing_disabled: BTreeSet::new(),
            write_atomicity: WriteAtomicity::new(),
            events: AsyncEventConfig::new(),
            clock: Clock { millis: 0, at: now_ms, set: false },
            keep_alive: 0,
            supports_interrupted: false,
            copy_formats: 0,
        }
    }
}

fn invalid_field() -> Status {
    Status::INVALID_FIELD.with_dnr()
}

fn invalid_namespace() -> Status {
    Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()
}

/// Checks the NSID of a command for a feature of the given scope.
///
/// A strict controller refuses to set a controller-scope feature for a namespace (Feature Not
/// Namespace Specific). This controller sets it for the whole controller, because hosts depend on
/// that: QEMU's `nvme://` block driver sets the volatile write cache with NSID 1 and fails to open
/// the device on an error, and nvme-cli sends the NSID of the namespace's device node.
fn check_namespace(scope: Scope, nsid: u32, all: bool, limits: &Limits) -> Result<(), Status> {
    let ok = match nsid {
        0 => scope == Scope::Controller,
        NSID_ALL => scope == Scope::Controller || all,
        // An inactive NSID is valid (Base 2.1, 3.2.1.5).
        _ if nsid <= limits.namespaces && !limits.active => return Err(invalid_field()),
        _ => nsid <= limits.namespaces,
    };
    if ok { Ok(()) } else { Err(invalid_namespace()) }
}

impl Features {
    /// Snapshot of the feature values.
    pub(crate) fn save(&self) -> SavedFeatures {
        SavedFeatures {
            arbitration: self.arbitration.into_bits(),
            power: self.power.into_bits(),
            over_temperature: self.over_temperature,
            under_temperature: self.under_temperature,
            error_recovery: self.error_recovery.iter().map(|(k, v)| (*k, *v)).collect(),
            write_cache: self.write_cache,
            queues: self.queues.map(NumberOfQueues::into_bits),
            coalescing: self.coalescing.map_or(0, InterruptCoalescing::into_bits),
            coalescing_chosen: self.coalescing.is_some(),
            coalescing_disabled: self.coalescing_disabled.iter().copied().collect(),
            write_atomicity: self.write_atomicity.into_bits(),
            events: self.events.into_bits(),
            clock: (self.clock.millis, self.clock.at, self.clock.set),
            keep_alive: self.keep_alive,
            supports_interrupted: self.supports_interrupted,
            copy_formats: self.copy_formats,
        }
    }

    /// Prepares a [snapshot](Self::save) for migration to a machine with another clock: stores the
    /// current value of the Timestamp feature in it.
    pub(crate) fn detach_clock(saved: &mut SavedFeatures) {
        let (millis, at, _) = &mut saved.clock;
        *millis = millis.wrapping_add(now_ms().saturating_sub(*at)) & MILLIS;
        *at = 0;
    }

    /// Adapts a snapshot that [`detach_clock`](Self::detach_clock) has prepared to the clock of
    /// this machine.
    pub(crate) fn join_clock(saved: &mut SavedFeatures) {
        saved.clock.1 = now_ms();
    }

    /// Restores a snapshot.
    pub(crate) fn restore(saved: &SavedFeatures) -> Self {
        let (millis, at, set) = saved.clock;
        Self {
            arbitration: Arbitration::from_bits(saved.arbitration),
            power: PowerManagement::from_bits(saved.power),
            over_temperature: saved.over_temperature,
            under_temperature: saved.under_temperature,
            error_recovery: saved.error_recovery.iter().copied().collect(),
            write_cache: saved.write_cache,
            queues: saved.queues.map(NumberOfQueues::from_bits),
            coalescing: saved.coalescing(),
            coalescing_disabled: saved.coalescing_disabled.iter().copied().collect(),
            write_atomicity: WriteAtomicity::from_bits(saved.write_atomicity),
            events: AsyncEventConfig::from_bits(saved.events),
            clock: Clock { millis, at, set },
            keep_alive: saved.keep_alive,
            supports_interrupted: saved.supports_interrupted,
            copy_formats: saved.copy_formats,
        }
    }

    /// Current value of the Timestamp feature.
    pub(crate) fn timestamp(&self) -> u64 {
        self.clock.read(now_ms()).into_bits()
    }

    /// Drops the values of namespace `nsid`, which was replaced or removed.
    pub(crate) fn clear_namespace(&mut self, nsid: u32) {
        self.error_recovery.remove(&nsid);
    }

    /// Restores the defaults at a Controller Level Reset, because no value is saveable. The
    /// timestamp restarts at 0.
    pub(crate) fn reset(&mut self) {
        *self = Self::new();
    }

    /// Executes Set Features. `data` is the data from the host, [`data_length`] bytes.
    ///
    /// # Errors
    /// The completion status of the command.
    pub(crate) fn set(
        &mut self,
        cmd: &SetFeatures,
        nsid: u32,
        data: Option<&[u8]>,
        limits: &Limits,
    ) -> Result<Set, Status> {
        self.set_at(cmd, nsid, data, limits, now_ms())
    }

    fn set_at(
        &mut self,
        cmd: &SetFeatures,
        nsid: u32,
        data: Option<&[u8]>,
        limits: &Limits,
        now_ms: u64,
    ) -> Result<Set, Status> {
        let scope = scope_of(cmd.fid, limits.volatile_cache)?;
        if cmd.sv {
            return Err(Status::FEATURE_NOT_SAVEABLE.with_dnr());
        }
        check_namespace(scope, nsid, true, limits)?;
        let value = cmd.cdw11;
        let mut dw0 = 0;
        let mut effect = Effect::None;
        match cmd.fid {
            fid::ARBITRATION => self.arbitration = Arbitration::from_bits(value & !RESERVED_BURST),
            fid::POWER_MANAGEMENT => self.power = power(value)?,
            fid::TEMPERATURE_THRESHOLD => {
                let wanted = TemperatureThreshold::from_bits(value);
                match threshold(wanted, true)? {
                    Threshold::Over => self.over_temperature = wanted.tmpth(),
                    Threshold::Under => self.under_temperature = wanted.tmpth(),
                }
                effect = Effect::TemperatureThreshold;
            }
            fid::ERROR_RECOVERY => {
                self.set_error_recovery(ErrorRecovery::from_bits(value), nsid, limits)?;
            }
            fid::VOLATILE_WRITE_CACHE => {
                self.write_cache = VolatileWriteCache::from_bits(value).wce();
                effect = Effect::VolatileWriteCache(self.write_cache);
            }
            fid::NUMBER_OF_QUEUES => {
                let granted = grant(NumberOfQueues::from_bits(value), limits)?;
                self.queues = Some(granted);
                dw0 = granted.into_bits();
                effect = Effect::NumberOfQueues {
                    submission: granted.nsq() + 1,
                    completion: granted.ncq() + 1,
                };
            }
            fid::INTERRUPT_COALESCING => {
                let coalescing = InterruptCoalescing::from_bits(value & 0xffff);
                self.coalescing = Some(coalescing);
                let (threshold, time) = (coalescing.thr(), coalescing.time());
                effect = Effect::InterruptCoalescing { threshold, time };
            }
            fid::INTERRUPT_VECTOR_CONFIGURATION => {
                let wanted = InterruptVectorConfiguration::from_bits(value);
                let (vector, coalescing_disabled) = (wanted.iv(), wanted.cd());
                check_vector(vector, limits)?;
                if coalescing_disabled {
                    self.coalescing_disabled.insert(vector);
                } else {
                    self.coalescing_disabled.remove(&vector);
                }
                effect = Effect::InterruptVector { vector, coalescing_disabled };
            }
            fid::WRITE_ATOMICITY => self.write_atomicity = WriteAtomicity::from_bits(value & 1),
            fid::ASYNC_EVENT_CONFIGURATION => {
                // Bits of unsupported events are ignored, not refused, so that a host can enable
                // all events that it knows.
                let has = EVENTS.with_anacn(limits.is_shared);
                self.events = AsyncEventConfig::from_bits(value & has.into_bits());
                effect = Effect::AsyncEventConfig(self.events);
            }
            fid::TIMESTAMP => {
                let data = data.ok_or(invalid_field())?;
                let (timestamp, _) =
                    Timestamp::read_from_prefix(data).map_err(|_| invalid_field())?;
                self.clock = Clock { millis: timestamp.millis(), at: now_ms, set: true };
            }
            fid::KEEP_ALIVE_TIMER => {
                // Base 2.1, "Keep Alive Timer": rounded up to the granularity in KAS.
                let rounded = value.checked_next_multiple_of(KEEP_ALIVE_GRANULARITY_MS);
                self.keep_alive = rounded.ok_or(Status::KEEP_ALIVE_TIMEOUT_INVALID.with_dnr())?;
                effect = Effect::KeepAlive(self.keep_alive);
            }
            fid::HOST_BEHAVIOR_SUPPORT => {
                let data = data.ok_or(invalid_field())?;
                let (wanted, _) =
                    HostBehaviorSupport::read_from_prefix(data).map_err(|_| invalid_field())?;
                (self.supports_interrupted, self.copy_formats) = host_behavior(&wanted)?;
                effect = Effect::CopyFormats(self.copy_formats);
            }
            // Only index 0 is valid: Identify lists one combination of I/O command sets.
            fid::IO_COMMAND_SET_PROFILE if IoCommandSetProfile::from_bits(value).iocsci() != 0 => {
                return Err(Status::IO_COMMAND_SET_COMBINATION_REJECTED.with_dnr());
            }
            fid::IO_COMMAND_SET_PROFILE => {}
            _ => return Err(invalid_field()),
        }
        Ok(Set { dw0, effect })
    }

    /// Executes Get Features.
    ///
    /// # Errors
    /// The completion status of the command.
    pub(crate) fn get(&self, cmd: &GetFeatures, nsid: u32, limits: &Limits) -> Result<Get, Status> {
        self.get_at(cmd, nsid, limits, now_ms())
    }

    fn get_at(
        &self,
        cmd: &GetFeatures,
        nsid: u32,
        limits: &Limits,
        now_ms: u64,
    ) -> Result<Get, Status> {
        let scope = scope_of(cmd.fid, limits.volatile_cache)?;
        // Strictly, NSID 0 is invalid for a namespace-scope feature (Base 2.1, 3.2.1.2). SPDK's
        // target returns the default, and its compliance suite and programs that list all features
        // of a controller depend on that.
        if !(scope == Scope::Namespace && nsid == 0) {
            check_namespace(scope, nsid, false, limits)?;
        }
        let defaults;
        let values = match Select::from_bits(cmd.sel).ok_or(invalid_field())? {
            Select::Current => self,
            // Without saveable values, the saved value is the default (Base 2.1, 5.1.11).
            Select::Default | Select::Saved => {
                defaults = Self::at_reset(now_ms);
                &defaults
            }
            Select::SupportedCapabilities => {
                let capabilities = Capabilities::new()
                    .with_namespace_specific(scope == Scope::Namespace)
                    .with_changeable(true);
                return Ok(Get { dw0: capabilities.into_bits(), data: None });
            }
        };
        let dw0 = match cmd.fid {
            fid::ARBITRATION => values.arbitration.into_bits(),
            fid::POWER_MANAGEMENT => values.power.into_bits(),
            fid::TEMPERATURE_THRESHOLD => {
                match threshold(TemperatureThreshold::from_bits(cmd.cdw11), false)? {
                    Threshold::Over => u32::from(values.over_temperature),
                    Threshold::Under => u32::from(values.under_temperature),
                }
            }
            fid::ERROR_RECOVERY => {
                let tler = values.error_recovery.get(&nsid).copied().unwrap_or(0);
                ErrorRecovery::new().with_tler(tler).into_bits()
            }
            fid::VOLATILE_WRITE_CACHE => {
                VolatileWriteCache::new().with_wce(values.write_cache).into_bits()
            }
            fid::NUMBER_OF_QUEUES => values.queues.unwrap_or(all_queues(limits)).into_bits(),
            fid::INTERRUPT_COALESCING => values.coalescing.unwrap_or_default().into_bits(),
            fid::INTERRUPT_VECTOR_CONFIGURATION => {
                let vector = InterruptVectorConfiguration::from_bits(cmd.cdw11).iv();
                check_vector(vector, limits)?;
                let disabled = values.coalescing_disabled.contains(&vector);
                InterruptVectorConfiguration::new().with_iv(vector).with_cd(disabled).into_bits()
            }
            fid::WRITE_ATOMICITY => values.write_atomicity.into_bits(),
            fid::ASYNC_EVENT_CONFIGURATION => values.events.into_bits(),
            fid::KEEP_ALIVE_TIMER => values.keep_alive,
            fid::TIMESTAMP => {
                let data = values.clock.read(now_ms).as_bytes().to_vec();
                return Ok(Get { dw0: 0, data: Some(data) });
            }
            fid::HOST_BEHAVIOR_SUPPORT => {
                let acre = values.supports_interrupted.into();
                let (lbafee, cdfe) = extended_and_copy(values.copy_formats);
                let behavior =
                    HostBehaviorSupport { acre, lbafee, cdfe, ..HostBehaviorSupport::default() };
                return Ok(Get { dw0: 0, data: Some(behavior.as_bytes().to_vec()) });
            }
            fid::IO_COMMAND_SET_PROFILE => IoCommandSetProfile::new().into_bits(),
            _ => return Err(invalid_field()),
        };
        Ok(Get { dw0, data: None })
    }

    /// True if `kelvins` is at or beyond a threshold: the temperature warning of the SMART / Health
    /// log page (Base 2.1, 5.1.25.1, "Temperature Threshold").
    pub(crate) fn temperature_warning(&self, kelvins: u16) -> bool {
        kelvins >= self.over_temperature || kelvins <= self.under_temperature
    }

    fn set_error_recovery(
        &mut self,
        wanted: ErrorRecovery,
        nsid: u32,
        limits: &Limits,
    ) -> Result<(), Status> {
        // DULBE would enable errors for deallocated blocks, which no namespace supports
        // (NSFEAT.DAE).
        if wanted.dulbe() {
            return Err(invalid_field());
        }
        let (first, last) = if nsid == NSID_ALL { (1, limits.namespaces) } else { (nsid, nsid) };
        self.error_recovery.extend((first..=last).map(|nsid| (nsid, wanted.tler())));
        Ok(())
    }
}

/// Decodes Power Management: only power state 0 is supported.
fn power(value: u32) -> Result<PowerManagement, Status> {
    let wanted = PowerManagement::from_bits(value & 0xff);
    if wanted.ps() == 0 { Ok(wanted) } else { Err(invalid_field()) }
}

/// Threshold of the composite temperature.
enum Threshold {
    Over,
    Under,
}

/// Temperature threshold that a command selects. Only the composite temperature has thresholds;
/// there are no other sensors. `all` is true if the selector "all" is allowed.
fn threshold(wanted: TemperatureThreshold, all: bool) -> Result<Threshold, Status> {
    match (wanted.tmpsel(), wanted.thsel()) {
        (0, 0) => Ok(Threshold::Over),
        (0, 1) => Ok(Threshold::Under),
        (0xf, 0) if all => Ok(Threshold::Over),
        (0xf, 1) if all => Ok(Threshold::Under),
        _ => Err(invalid_field()),
    }
}

fn all_queues(limits: &Limits) -> NumberOfQueues {
    let count0 = limits.io_queues.saturating_sub(1);
    NumberOfQueues::new().with_nsq(count0).with_ncq(count0)
}

/// Grants the requested number of queues up to the supported number (Base 2.1, "Number of Queues").
fn grant(wanted: NumberOfQueues, limits: &Limits) -> Result<NumberOfQueues, Status> {
    if wanted.nsq() == u16::MAX || wanted.ncq() == u16::MAX {
        return Err(invalid_field());
    }
    if limits.queues_exist {
        return Err(Status::COMMAND_SEQUENCE_ERROR.with_dnr());
    }
    let all = all_queues(limits);
    Ok(NumberOfQueues::new()
        .with_nsq(wanted.nsq().min(all.nsq()))
        .with_ncq(wanted.ncq().min(all.ncq())))
}

fn check_vector(vector: u16, limits: &Limits) -> Result<(), Status> {
    if vector < limits.vectors { Ok(()) } else { Err(invalid_field()) }
}

/// Milliseconds of a monotonic clock of the machine. All processes read the same clock, so the
/// timestamp continues in the next process after an upgrade or a crash.
fn now_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let (seconds, nanos) = (now.tv_sec as u64, now.tv_nsec as u64);
    seconds.wrapping_mul(1000).wrapping_add(nanos / 1_000_000)
}

impl Clock {
    fn read(self, now_ms: u64) -> Timestamp {
        let millis = self.millis.wrapping_add(now_ms.saturating_sub(self.at)) & MILLIS;
        Timestamp::new().with_millis(millis).with_origin(self.set.into())
    }
}

/// Mask of a timestamp's 48 bits.
const MILLIS: u64 = (1 << 48) - 1;

/// Supported bits of Copy Descriptor Formats Enable: formats whose ranges have a source NSID.
const COPY_FORMATS: u16 = 1 << 2 | 1 << 3;

/// Bit for LBAFEE: the host supports formats with guards of more than 16 bits. The lower bits of
/// the same word contain the enabled descriptor formats of Copy.
pub(crate) const EXTENDED_FORMATS: u16 = 1 << 15;

/// Decodes Host Behavior Support. Returns true if the host supports Advanced Command Retry, and a
/// word with the enabled descriptor formats of Copy and the bit [`EXTENDED_FORMATS`]. Refuses to
/// enable unsupported functions (dispersed namespaces, Copy format 4, telemetry data area 4).
fn host_behavior(wanted: &HostBehaviorSupport) -> Result<(bool, u16), Status> {
    let HostBehaviorSupport { acre, etdas, lbafee, hdisns, cdfe, .. } = *wanted;
    if acre > 1 || lbafee > 1 || (etdas, hdisns, cdfe & !COPY_FORMATS) != (0, 0, 0) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    Ok((acre == 1, if lbafee == 1 { cdfe | EXTENDED_FORMATS } else { cdfe }))
}

/// Splits the word that [`host_behavior`] returns into LBAFEE and CDFE.
fn extended_and_copy(formats: u16) -> (u8, u16) {
    (u8::from(formats & EXTENDED_FORMATS != 0), formats & !EXTENDED_FORMATS)
}

/// EXHID in dword 11: the Host Identifier has 128 bits.
const EXHID: u32 = 1;

/// Number of bytes that Get or Set Features transfers for the Host Identifier.
pub(crate) fn host_identifier_bytes(cdw11: u32) -> usize {
    if cdw11 & EXHID != 0 { 16 } else { 8 }
}

/// KAS of Identify Controller in milliseconds: timeouts are rounded up to multiples of it.
pub(crate) const KEEP_ALIVE_GRANULARITY_MS: u32 = 1000;

/// Keep Alive Timer.
#[derive(Debug, Default)]
pub(crate) struct KeepAlive {
    /// Timeout and expiry time.
    expires_at: Option<(Duration, Instant)>,
}

impl KeepAlive {
    /// Sets the timeout; 0 disables the timer.
    pub(crate) fn set(&mut self, milliseconds: u32, now: Instant) {
        let timeout = Duration::from_millis(milliseconds.into());
        self.expires_at = (milliseconds != 0).then(|| (timeout, now + timeout));
    }

    /// Restarts the timer after a command of the host, or after a time in which the controller
    /// could not process commands.
    pub(crate) fn restart(&mut self, now: Instant) {
        if let Some((timeout, expires_at)) = &mut self.expires_at {
            *expires_at = now + *timeout;
        }
    }

    /// Returns true if the timer has expired, and then disables it.
    pub(crate) fn expires(&mut self, now: Instant) -> bool {
        self.expires_at.take_if(|(_, expires_at)| *expires_at <= now).is_some()
    }

    /// Time at which the timer expires, if it is enabled.
    pub(crate) fn expires_at(&self) -> Option<Instant> {
        self.expires_at.map(|(_, at)| at)
    }
}

#[cfg(test)]
mod tests;
