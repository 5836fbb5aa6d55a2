//! The state of a controller at rest, as plain data: what its successor in another process needs.
//!
//! A later release may add a field with a default; whoever changes what a field means, or takes one
//! away, counts up [`shadowbell_state::VERSION`].

use crate::stats::{CqStats, IoStats, SqStats};
use serde::{Deserialize, Serialize};
use shadowbell_spec::feature::InterruptCoalescing;
use shadowbell_state::{Bytes, FdRef};

/// The state of a controller at rest ([`Controller::freeze`](crate::Controller::freeze)), to be
/// written down and read again; its descriptors are beside it
/// ([`Descriptors`](shadowbell_state::Descriptors)).
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedController {
    pub(crate) shape: SavedShape,
    /// The file of the page of doorbells.
    pub(crate) doorbells: FdRef,
    pub(crate) control: SavedControl,
    pub(crate) admin: Option<SavedAdminQueue>,
    pub(crate) parts: Vec<SavedPart>,
    /// It has a worker of its own.
    pub(crate) isolated: bool,
    /// Vectors that were raised while they had no descriptor.
    pub(crate) pending_vectors: Vec<u16>,
    pub(crate) counters: SavedCounters,
    /// It was written down at work: how far its queues are is in there.
    #[serde(default)]
    pub(crate) journal: Option<SavedJournal>,
}

/// How a process has died for whose controllers another one goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Death {
    /// From outside, or for want of memory: nothing that it had in hand is the reason.
    #[default]
    Killed,
    /// By itself, by a fault of the program. A command that it had in hand may be the reason.
    Fault,
}

impl SavedController {
    /// The namespaces that it has, in the order of their NSIDs.
    pub fn namespaces(&self) -> impl Iterator<Item = SeenNamespace> {
        // Without NSIDs they are counted.
        (1..).zip(&self.shape.namespaces).map(|(at, ns)| SeenNamespace {
            nsid: if ns.nsid == 0 { at } else { ns.nsid },
            uuid: ns.uuid,
            blocks: ns.blocks,
            read_only: ns.read_only,
        })
    }
}

/// A namespace as the host of a [`SavedController`] has it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SeenNamespace {
    /// Its NSID.
    pub nsid: u32,
    /// Its UUID.
    pub uuid: [u8; 16],
    /// Its size in logical blocks.
    pub blocks: u64,
    /// It takes no writes.
    pub read_only: bool,
}

/// The journal of a controller at work.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedJournal {
    pub(crate) file: FdRef,
    /// Records of each worker.
    pub(crate) records: usize,
}

/// What a host has seen of the configuration, which it takes to be as it was.
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
    /// What the host was told of all namespaces, if the configuration did not say it.
    #[serde(default)]
    pub(crate) told: Option<SavedPromises>,
}

/// What a host was told of the namespaces, and relies on whatever becomes of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedPromises {
    pub(crate) highest_nsid: u32,
    pub(crate) volatile_cache: bool,
    pub(crate) zeroes: u64,
}

impl SavedShape {
    /// What of it is otherwise in `other`, if anything is.
    pub(crate) fn difference(&self, other: &Self) -> Option<&'static str> {
        [
            (self.serial == other.serial, "serial number"),
            (self.model == other.model, "model number"),
            (self.io_queues == other.io_queues, "number of I/O queues"),
            (self.max_queue_entries == other.max_queue_entries, "size of queues"),
            (self.mdts == other.mdts, "transfer limit"),
            (self.shadow_doorbells == other.shadow_doorbells, "offer of shadow doorbells"),
            (self.mapped_doorbells == other.mapped_doorbells, "kind of doorbells"),
            (self.has_namespaces_of(other), "set of namespaces"),
        ]
        .into_iter()
        .find_map(|(is_same, what)| (!is_same).then_some(what))
    }
}

impl SavedShape {
    fn has_namespaces_of(&self, other: &Self) -> bool {
        // Without NSIDs they are counted.
        let nsid = |at: u32, ns: &SavedNamespace| if ns.nsid == 0 { at } else { ns.nsid };
        let numbered = |namespaces: &[SavedNamespace]| -> Vec<_> {
            (1..).zip(namespaces).map(|(at, ns)| (nsid(at, ns), ns.clone())).collect()
        };
        let same = |(a, b): (&(u32, SavedNamespace), &(u32, SavedNamespace))| {
            let (nsid, namespace) = b;
            a.0 == *nsid && a.1 == SavedNamespace { nsid: a.1.nsid, ..namespace.clone() }
        };
        let (ours, theirs) = (numbered(&self.namespaces), numbered(&other.namespaces));
        ours.len() == theirs.len() && ours.iter().zip(&theirs).all(same)
    }
}

/// As above, of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedNamespace {
    /// 0 if they are counted.
    #[serde(default)]
    pub(crate) nsid: u32,
    pub(crate) uuid: [u8; 16],
    pub(crate) blocks: u64,
    pub(crate) block_size: u32,
    pub(crate) read_only: bool,
}

/// The control plane.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedControl {
    pub(crate) registers: SavedRegisters,
    /// Commands are served.
    pub(crate) enabled: bool,
    pub(crate) generation: u64,
    pub(crate) power_cycles: u64,
    pub(crate) unsafe_shutdowns: u64,
    /// How long it exists, in milliseconds.
    pub(crate) powered_ms: u64,
    /// The buffers of Doorbell Buffer Config.
    pub(crate) shadow: Option<(u64, u64)>,
    pub(crate) features: SavedFeatures,
    /// Namespaces that have changed.
    pub(crate) changed: Vec<u32>,
    pub(crate) events: SavedEvents,
    pub(crate) errors: SavedErrors,
    /// Submission and completion queues that the host may create.
    pub(crate) granted: (u16, u16),
    /// Logical blocks that are marked as uncorrectable: NSID, the first of a range, the one after
    /// its last.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) uncorrectable: Vec<(u32, u64, u64)>,
    /// How often these have changed.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) uncorrectable_changes: u16,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) diagnostics: SavedDiagnostics,
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) sharing: SavedSharing,
    /// How long ago the last reset was, in milliseconds.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) reset_ms: u64,
    /// The UUID of the namespace that the host has had created last.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) creating: Option<[u8; 16]>,
    /// A reset is under way; and whether it sets all registers back.
    #[serde(default)]
    pub(crate) resetting: Option<bool>,
}

/// What the host of one of several controllers has said, and is to be told.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedSharing {
    /// Host Identifier, as the feature transfers it.
    pub(crate) host: Vec<u8>,
    /// Reservation Notification Mask by namespace.
    pub(crate) masks: Vec<(u32, u32)>,
    /// Notices: number, type, namespace; and how many there were.
    pub(crate) notices: Vec<(u64, u8, u32)>,
    pub(crate) notices_made: u64,
    /// What it can know of the states of ANA groups.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) ana: SavedAna,
}

/// What a host can know of the states of ANA groups.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedAna {
    /// Change Count.
    pub(crate) count: u64,
    /// Groups: identifier, state, and the count of its last change.
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

/// Features by what the host has set.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedFeatures {
    pub(crate) arbitration: u32,
    pub(crate) power: u32,
    pub(crate) over_temperature: u16,
    pub(crate) under_temperature: u16,
    /// Namespace and TLER.
    pub(crate) error_recovery: Vec<(u32, u16)>,
    pub(crate) write_cache: bool,
    pub(crate) queues: Option<u32>,
    pub(crate) coalescing: u32,
    /// The host has set it. A record of an older version has it if it is not 0.
    #[serde(default)]
    pub(crate) coalescing_chosen: bool,
    pub(crate) coalescing_disabled: Vec<u16>,
    pub(crate) write_atomicity: u32,
    pub(crate) events: u32,
    /// Milliseconds that the timestamp was set to, when that was by our clock, and whether the host
    /// has set it.
    pub(crate) clock: (u64, u64, bool),
    #[serde(default)]
    pub(crate) knows_interrupted: bool,
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
        let is_set = self.coalescing_chosen || self.coalescing != 0;
        is_set.then(|| InterruptCoalescing::from_bits(self.coalescing))
    }
}

/// Type, information, log page.
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
    /// As in the log page, the newest first.
    pub(crate) entries: Vec<Vec<u8>>,
    pub(crate) count: u64,
    /// How many there were of each status.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) kinds: Vec<(u16, u64)>,
}

/// A self-test under way, and results of others.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedSelfTest {
    pub(crate) run: Option<SavedSelfTestRun>,
    /// As in the log page, the newest first.
    pub(crate) results: Vec<Vec<u8>>,
}

/// Segment, namespace and block, and status.
pub(crate) type SavedFailure = (u8, Option<(u32, u64)>, u16);

/// A self-test under way.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedSelfTestRun {
    pub(crate) code: u8,
    /// Namespaces that are left, and how many there were.
    pub(crate) nsids: Vec<u32>,
    pub(crate) count: usize,
    /// The piece of the first of them that is next.
    pub(crate) piece: u64,
    /// The first failure.
    pub(crate) failure: Option<SavedFailure>,
    /// How long it is under way, in milliseconds.
    pub(crate) for_ms: u64,
}

/// What was captured: the data, the last blocks of the areas, and why.
pub(crate) type SavedCapture = (Bytes, [u16; 3], String);

/// Telemetry.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedTelemetry {
    pub(crate) host: SavedCapture,
    pub(crate) host_generation: u8,
    pub(crate) own: SavedCapture,
    pub(crate) own_generation: u8,
    pub(crate) is_new: bool,
}

/// The Persistent Event log.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedEventLog {
    /// With their headers, the oldest first.
    pub(crate) events: Vec<Bytes>,
    /// The page that the host reads.
    pub(crate) context: Option<Bytes>,
    pub(crate) generation: u16,
    /// How long ago the last snapshot of health was, in milliseconds.
    pub(crate) snapshot_ms: Option<u64>,
}

/// What is kept for supporters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct SavedDiagnostics {
    pub(crate) self_test: SavedSelfTest,
    pub(crate) telemetry: SavedTelemetry,
    pub(crate) events: SavedEventLog,
}

/// A doorbell, as the controller sees it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SavedDoorbell {
    pub(crate) last: u16,
    pub(crate) truth: SavedTruth,
    pub(crate) snapshot: Option<u32>,
}

/// Where its value is to be found.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) enum SavedTruth {
    Register,
    Last,
    Shadow,
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
    /// Completions that are not posted yet, without their phase tags.
    pub(crate) staged: Vec<(u64, u64)>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedAdminQueue {
    pub(crate) sq: SavedSq,
    pub(crate) cq: SavedCq,
    /// A command was fetched.
    pub(crate) used: bool,
    pub(crate) lacks_cq: bool,
    /// Submission queue entries of commands that are under way.
    #[serde(default)]
    pub(crate) under_way: Vec<Bytes>,
}

/// The queues that one worker has served.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedPart {
    /// Its number.
    pub(crate) worker: usize,
    pub(crate) sqs: Vec<SavedSq>,
    pub(crate) cqs: Vec<SavedCq>,
    /// Descriptors that stand for doorbells.
    pub(crate) doorbell_eventfds: Vec<FdRef>,
}

/// What was counted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SavedCounters {
    pub(crate) io: IoStats,
    pub(crate) sq: SqStats,
    pub(crate) cq: CqStats,
    pub(crate) eventfd_doorbells: u64,
    /// Processes that have died with it. A guest that moves leaves that behind, and its stream is
    /// as that of releases before.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) recoveries: u64,
}

/// Whether it may be left out, as releases before have nothing of it.
fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// What is recorded of a control plane at work.
pub(crate) struct Recorded {
    pub(crate) control: SavedControl,
    pub(crate) admin: Option<SavedAdminQueue>,
    pub(crate) parts: Vec<SavedPart>,
}
