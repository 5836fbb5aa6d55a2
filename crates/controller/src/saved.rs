//! Snapshot format of a controller, as plain data for the next process, and the interface that
//! stores checkpoints.
//!
//! A later release may add a field with a default; the previous release refuses the state then,
//! unless the field is [skippable](shadowbell_state::read_fields). A change of a field's meaning,
//! or the removal of a field, must increment [`shadowbell_state::VERSION`].

use crate::stats::{CqStats, IoStats, SqStats};
use serde::{Deserialize, Serialize};
use shadowbell_spec::feature::InterruptCoalescing;
use shadowbell_state::{Bytes, Descriptors, FdRef};

/// Serializable snapshot of a controller. It is either quiesced
/// ([`Controller::freeze`](crate::Controller::freeze)), or running, in a checkpoint for crash
/// recovery. Descriptors are passed separately ([`Descriptors`]).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedController {
    pub(crate) shape: SavedShape,
    /// Memory file of the doorbell page.
    pub(crate) doorbells: FdRef,
    pub(crate) control: SavedControl,
    pub(crate) admin: Option<SavedAdminQueue>,
    pub(crate) parts: Vec<SavedPart>,
    /// True if the controller has a dedicated I/O thread.
    pub(crate) isolated: bool,
    /// Interrupt vectors that were raised while no eventfd was connected.
    pub(crate) pending_vectors: Vec<u16>,
    pub(crate) counters: SavedCounters,
    /// Journal with the queue positions, in a snapshot of a running controller.
    #[serde(default)]
    pub(crate) journal: Option<SavedJournal>,
}

/// Cause of death of a process, for the recovery of its controllers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CauseOfDeath {
    /// The process was killed by another process or by the OOM killer, so the commands in flight
    /// are not the cause.
    #[default]
    Killed,
    /// The process crashed by a program fault. A command in flight may be the cause.
    Fault,
    /// The process ended in an upgrade after a quiesce: no command was in flight.
    Planned,
}

impl SavedController {
    /// Number of completed I/O commands.
    #[must_use]
    pub fn io_commands(&self) -> u64 {
        self.counters.io.commands()
    }

    /// Namespaces in ascending order of NSID.
    pub fn namespaces(&self) -> impl Iterator<Item = SeenNamespace> {
        self.shape.namespaces.iter().map(|ns| SeenNamespace {
            nsid: ns.nsid,
            uuid: ns.uuid,
            blocks: ns.blocks,
            read_only: ns.read_only,
        })
    }
}

/// Namespace of a [`SavedController`] as its host sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SeenNamespace {
    /// NSID.
    pub nsid: u32,
    /// UUID.
    pub uuid: [u8; 16],
    /// Size in logical blocks.
    pub blocks: u64,
    /// True if writes are refused.
    pub read_only: bool,
}

/// Journal of a running controller.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedJournal {
    pub(crate) file: FdRef,
    /// Number of records per I/O thread.
    pub(crate) records: usize,
}

/// Host-visible configuration. The next process must have the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedShape {
    pub(crate) serial: String,
    pub(crate) model: String,
    pub(crate) io_queues: u16,
    pub(crate) max_queue_entries: u32,
    pub(crate) mdts: u8,
    pub(crate) shadow_doorbells: bool,
    pub(crate) mapped_doorbells: bool,
    pub(crate) namespaces: Vec<SavedNamespace>,
    /// Common properties of all namespaces, which the host has read in Identify Controller.
    #[serde(default)]
    pub(crate) guarantees: Option<SavedGuarantees>,
}

/// Properties in Identify Controller on which the host relies, even if namespaces change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedGuarantees {
    pub(crate) highest_nsid: u32,
    pub(crate) volatile_cache: bool,
    pub(crate) zeroes: u64,
}

impl SavedShape {
    /// First difference from `other`, as a noun for an error message.
    pub(crate) fn difference(&self, other: &Self) -> Option<&'static str> {
        [
            (self.serial == other.serial, "serial number"),
            (self.model == other.model, "model number"),
            (self.io_queues == other.io_queues, "number of I/O queues"),
            (self.max_queue_entries == other.max_queue_entries, "maximum queue size"),
            (self.mdts == other.mdts, "transfer limit"),
            (self.shadow_doorbells == other.shadow_doorbells, "shadow doorbell support"),
            (self.mapped_doorbells == other.mapped_doorbells, "doorbell mode"),
            (self.namespaces == other.namespaces, "set of namespaces"),
        ]
        .into_iter()
        .find_map(|(is_same, what)| (!is_same).then_some(what))
    }
}

/// Host-visible configuration of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedNamespace {
    pub(crate) nsid: u32,
    pub(crate) uuid: [u8; 16],
    pub(crate) blocks: u64,
    pub(crate) block_size: u32,
    pub(crate) read_only: bool,
}

/// Snapshot of the control plane.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedControl {
    pub(crate) registers: SavedRegisters,
    /// True if the controller is ready (CSTS.RDY).
    pub(crate) enabled: bool,
    pub(crate) generation: u64,
    pub(crate) power_cycles: u64,
    pub(crate) unsafe_shutdowns: u64,
    /// Age of the controller in milliseconds.
    pub(crate) powered_ms: u64,
    /// Shadow doorbell page and EventIdx page of Doorbell Buffer Config.
    pub(crate) shadow: Option<(u64, u64)>,
    pub(crate) features: SavedFeatures,
    /// Changed Attached Namespace List.
    pub(crate) changed: Vec<u32>,
    pub(crate) events: SavedEvents,
    pub(crate) errors: SavedErrors,
    /// Numbers of submission and completion queues that the host may create.
    pub(crate) granted: (u16, u16),
    /// Logical blocks that are marked as uncorrectable: NSID, first block and the block after the
    /// last.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) uncorrectable: Vec<(u32, u64, u64)>,
    /// LBA Status Generation Counter (LSGC): number of additions to `uncorrectable`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) uncorrectable_changes: u16,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) diagnostics: SavedDiagnostics,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) sharing: SavedSharing,
    /// Time since the last reset in milliseconds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) reset_ms: u64,
    /// UUID of the namespace whose creation the host has requested last.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) creating: Option<[u8; 16]>,
    /// Present if a reset is in progress; true if the reset restores all registers.
    #[serde(default)]
    pub(crate) resetting: Option<bool>,
}

/// State of a controller in a subsystem: host identity, notifications and ANA.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedSharing {
    /// Host Identifier, in the format of the feature's data.
    pub(crate) host: Vec<u8>,
    /// Reservation Notification Mask by NSID.
    pub(crate) masks: Vec<(u32, u32)>,
    /// Pending reservation notifications: number, type, NSID.
    pub(crate) notices: Vec<(u64, u8, u32)>,
    pub(crate) last_notice: u64,
    /// ANA states and Change Counts, as reported to the host.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) ana: SavedAna,
}

/// ANA states and Change Counts, as reported to the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedAna {
    /// Change Count.
    pub(crate) count: u64,
    /// Groups: identifier, state, and the Change Count of the last change.
    pub(crate) groups: Vec<(u32, u8, u64)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedRegisters {
    pub(crate) cc: u32,
    pub(crate) csts: u32,
    pub(crate) aqa: u32,
    pub(crate) asq: u64,
    pub(crate) acq: u64,
    pub(crate) intms: u32,
}

/// Feature values that the host has set.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedFeatures {
    pub(crate) arbitration: u32,
    pub(crate) power: u32,
    pub(crate) over_temperature: u16,
    pub(crate) under_temperature: u16,
    /// NSIDs with their value of Time Limited Error Recovery (TLER).
    pub(crate) error_recovery: Vec<(u32, u16)>,
    pub(crate) write_cache: bool,
    pub(crate) queues: Option<u32>,
    pub(crate) coalescing: u32,
    /// True if the host has set Interrupt Coalescing.
    pub(crate) coalescing_chosen: bool,
    pub(crate) coalescing_disabled: Vec<u16>,
    pub(crate) write_atomicity: u32,
    pub(crate) events: u32,
    /// Timestamp in milliseconds, the time on this machine's clock when it was set, and true if the
    /// host has set it.
    pub(crate) clock: (u64, u64, bool),
    #[serde(default)]
    pub(crate) supports_interrupted: bool,
    /// Copy Descriptor Formats Enable.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) copy_formats: u16,
    /// Keep Alive Timeout in milliseconds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) keep_alive: u32,
}

impl SavedFeatures {
    /// Interrupt Coalescing, if the host has set it.
    pub(crate) fn coalescing(&self) -> Option<InterruptCoalescing> {
        self.coalescing_chosen.then(|| InterruptCoalescing::from_bits(self.coalescing))
    }
}

/// Asynchronous event: type, information, log page.
pub(crate) type SavedEvent = (u8, u8, u8);

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedEvents {
    pub(crate) outstanding: Vec<u16>,
    pub(crate) pending: Vec<SavedEvent>,
    pub(crate) unread: Vec<SavedEvent>,
    pub(crate) config: u32,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedErrors {
    /// Entries as in the log page, newest first.
    pub(crate) entries: Vec<Vec<u8>>,
    pub(crate) count: u64,
    /// Number of errors by status.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) kinds: Vec<(u16, u64)>,
}

/// Device self-test in progress, and earlier results.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedSelfTest {
    pub(crate) run: Option<SavedSelfTestRun>,
    /// Results as in the log page, newest first.
    pub(crate) results: Vec<Vec<u8>>,
}

/// Failure of a self-test: segment, NSID and block (if known), and status.
pub(crate) type SavedFailure = (u8, Option<(u32, u64)>, u16);

/// Device self-test in progress.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedSelfTestRun {
    pub(crate) code: u8,
    /// NSIDs of the remaining namespaces; `count` is the number of all tested namespaces.
    pub(crate) nsids: Vec<u32>,
    pub(crate) count: usize,
    /// Index of the next piece in the first remaining namespace.
    pub(crate) piece: u64,
    /// First failure.
    pub(crate) failure: Option<SavedFailure>,
    /// Elapsed time in milliseconds.
    pub(crate) for_ms: u64,
}

/// Captured telemetry: data, last blocks of the three data areas, and reason.
pub(crate) type SavedCapture = (Bytes, [u16; 3], String);

/// Host-initiated and controller-initiated telemetry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedTelemetry {
    pub(crate) host: SavedCapture,
    pub(crate) host_generation: u8,
    pub(crate) controller_initiated: SavedCapture,
    pub(crate) controller_initiated_generation: u8,
    pub(crate) is_new: bool,
}

/// Persistent Event log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedEventLog {
    /// Events with their headers, oldest first.
    pub(crate) events: Vec<Bytes>,
    /// Log page of the established reporting context.
    pub(crate) context: Option<Bytes>,
    pub(crate) generation: u16,
    /// Time since the last SMART/health snapshot in milliseconds.
    pub(crate) snapshot_ms: Option<u64>,
}

/// Diagnostic data for support engineers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedDiagnostics {
    pub(crate) self_test: SavedSelfTest,
    pub(crate) telemetry: SavedTelemetry,
    pub(crate) events: SavedEventLog,
}

/// Serialized state of a doorbell: last value, source of its value, and snapshot of its shadow
/// entry.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SavedDoorbell {
    pub(crate) last: u16,
    pub(crate) truth: SavedTruth,
    pub(crate) snapshot: Option<u32>,
}

/// Source of a doorbell's current value.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum SavedTruth {
    Register,
    Last,
    Shadow,
    Invalid,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedSq {
    pub(crate) qid: u16,
    pub(crate) iova: u64,
    pub(crate) entries: u32,
    pub(crate) cqid: u16,
    pub(crate) head: u16,
    pub(crate) tail: SavedDoorbell,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedCq {
    pub(crate) qid: u16,
    pub(crate) iova: u64,
    pub(crate) entries: u32,
    pub(crate) vector: Option<u16>,
    pub(crate) tail: u16,
    pub(crate) phase: bool,
    pub(crate) head: SavedDoorbell,
    /// Completions that are not posted yet, without phase tags.
    pub(crate) staged: Vec<(u64, u64)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedAdminQueue {
    pub(crate) sq: SavedSq,
    pub(crate) cq: SavedCq,
    /// True if a command was fetched since the controller was enabled.
    pub(crate) used: bool,
    pub(crate) lacks_cq: bool,
    /// Submission queue entries of commands in flight.
    #[serde(default)]
    pub(crate) in_flight: Vec<Bytes>,
}

/// Snapshot of the queues of one I/O thread.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedPart {
    /// Number of the I/O thread.
    pub(crate) worker: usize,
    pub(crate) sqs: Vec<SavedSq>,
    pub(crate) cqs: Vec<SavedCq>,
    /// Doorbell eventfds.
    pub(crate) doorbell_eventfds: Vec<FdRef>,
}

/// Counters of deleted queues and ended commands.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedCounters {
    pub(crate) io: IoStats,
    pub(crate) sq: SqStats,
    pub(crate) cq: CqStats,
    pub(crate) eventfd_doorbells: u64,
    /// Number of recoveries. 0 after a migration. The field is omitted if it is 0, so earlier
    /// releases can read the state of a migrated controller.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) recoveries: u64,
}

/// True if the value is the default. The field is then omitted, so that releases without the field
/// can read the snapshot.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Checkpointed state of a running control plane.
pub(crate) struct Recorded {
    pub(crate) control: SavedControl,
    pub(crate) admin: Option<SavedAdminQueue>,
    pub(crate) parts: Vec<SavedPart>,
}

/// Stores checkpoints of a running controller. If this process dies, the next process recovers the
/// controller from the last checkpoint ([`Controller::recover`](crate::Controller::recover)).
pub trait Recorder: Send + Sync {
    /// Stores a checkpoint. `fds` are the descriptors to which `state` refers. The host does not
    /// see the new state before this method returns. The method is called for register writes and
    /// admin commands, on the thread that handles them, so it should take at most about ten
    /// microseconds.
    fn record(&self, state: &SavedController, fds: Descriptors);
}
