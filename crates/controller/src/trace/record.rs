//! Trace record, in binary and text form, and the layout of a trace file.

use std::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a record in the file.
pub(super) const RECORD_BYTES: usize = 32;

/// Bit of [`Record::qid`] that marks a completion queue and its head doorbell. Queue identifiers
/// are at most 64, so they never use the bit.
pub const COMPLETION_QUEUE: u16 = 1 << 15;

/// Record in its binary form.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub(super) struct RawRecord {
    /// Nanoseconds since the start of the trace.
    pub(super) time_ns: u64,
    /// Number of records written to the ring before this one. A reader uses it to detect that a
    /// record was overwritten.
    pub(super) sequence: u64,
    pub(super) value: u32,
    pub(super) extra: u32,
    pub(super) controller: u16,
    pub(super) qid: u16,
    pub(super) kind: u8,
    pub(super) reserved: [u8; 3],
}

macro_rules! kinds {
    ($($(#[doc = $doc:literal])* $kind:ident = $value:literal, $text:literal;)*) => {
        /// Kind of a trace record. Each variant documents `value` and `extra`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Kind {
            $($(#[doc = $doc])* $kind = $value,)*
        }

        impl Kind {
            /// All kinds, ordered by number.
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            /// Name of the kind in text output.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$kind => $text,)* }
            }

            pub(super) const fn from_byte(byte: u8) -> Option<Self> {
                match byte {
                    $($value => Some(Self::$kind),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// Trapped write of a doorbell register. `value`: the value written.
    MmioWrite = 1, "MMIO write";
    /// New value of a shadow doorbell, found by polling. `value`: the new one; `extra`: the old
    /// one.
    ShadowNew = 2, "shadow doorbell moved";
    /// EventIdx was moved, so that the host's next updates need no MMIO write. `value`: the new
    /// EventIdx.
    EventIdxMoved = 3, "EventIdx moved";
    /// EventIdx set so that the host's next update needs an MMIO write. `value`: the new EventIdx.
    EventIdxArmed = 4, "EventIdx armed";
    /// I/O thread goes to sleep.
    Sleep = 5, "sleep";
    /// I/O thread woke up. `value`: the duration of the sleep in microseconds.
    Wake = 6, "wake";
    /// I/O thread woke up and found no work.
    SpuriousWake = 7, "spurious wake";
    /// Interrupt raised for a completion queue. `value`: its tail; `extra`: the vector.
    InterruptRaised = 8, "interrupt raised";
    /// Completions posted to a completion queue without an interrupt. `value`: tail of the queue.
    InterruptSuppressed = 9, "interrupt suppressed";
    /// Commands fetched from a submission queue. `value`: tail of the queue; `extra`: number of
    /// commands.
    Batch = 10, "batch fetched";
    /// Fetching stopped because a completion queue is full. `value`: tail of the completion queue.
    CqFull = 11, "completion queue full";
    /// Invalid doorbell value. `value`: the value.
    Invalid = 12, "invalid doorbell value";
    /// Controller reset.
    Reset = 13, "controller reset";
    /// Doorbell Buffer Config: the queues have shadow doorbells from now on.
    ShadowConfigured = 14, "shadow doorbells configured";
    /// Queue created. `value`: its size in entries; `extra`: the completion queue of a submission
    /// queue, or the vector of a completion queue.
    QueueCreated = 15, "queue created";
    /// Queue deleted.
    QueueDeleted = 16, "queue deleted";
    /// I/O thread found the doorbell eventfd of a controller signalled, when it prepared to sleep
    /// or checked its eventfds.
    DoorbellEvent = 17, "doorbell eventfd signalled";
    /// Command found in a submission queue. `value`: its command identifier; `extra`: its opcode.
    CommandSeen = 18, "command seen";
    /// Completion posted to a completion queue. `value`: the command identifier, and the submission
    /// queue in the upper 16 bits; `extra`: the status field without the phase tag.
    CompletionPosted = 19, "completion posted";
}

/// Object that the records of a kind are about.
enum Subject {
    /// An I/O thread or a controller.
    Whole,
    /// A submission or completion queue, distinguished by [`COMPLETION_QUEUE`].
    Queue,
    SubmissionQueue,
    CompletionQueue,
}

/// Queue that a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Queue {
    /// Submission queue, by identifier.
    Submission(u16),
    /// Completion queue, by identifier.
    Completion(u16),
}

impl fmt::Display for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Submission(qid) => write!(f, "SQ {qid}"),
            Self::Completion(qid) => write!(f, "CQ {qid}"),
        }
    }
}

impl Kind {
    fn subject(self) -> Subject {
        match self {
            Self::Sleep
            | Self::Wake
            | Self::SpuriousWake
            | Self::Reset
            | Self::ShadowConfigured
            | Self::DoorbellEvent => Subject::Whole,
            Self::InterruptRaised
            | Self::InterruptSuppressed
            | Self::CqFull
            | Self::CompletionPosted => Subject::CompletionQueue,
            Self::Batch | Self::CommandSeen => Subject::SubmissionQueue,
            Self::MmioWrite
            | Self::ShadowNew
            | Self::EventIdxMoved
            | Self::EventIdxArmed
            | Self::Invalid
            | Self::QueueCreated
            | Self::QueueDeleted => Subject::Queue,
        }
    }
}

/// Trace record. Its `Display` is a line of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Nanoseconds since the start of the trace.
    pub time_ns: u64,
    /// Kind of the event.
    pub kind: Kind,
    /// Index of the I/O thread that recorded the event; `None` for the control plane.
    pub worker: Option<u16>,
    /// Number of the controller, from 1; 0 for an event of the I/O thread itself.
    pub controller: u16,
    /// Queue identifier; 0 is the admin queue. For kinds that apply to both types of queue,
    /// [`COMPLETION_QUEUE`] marks a completion queue.
    pub qid: u16,
    /// Value, as documented for the [`Kind`].
    pub value: u32,
    /// Second value, as documented for the [`Kind`].
    pub extra: u32,
}

impl Record {
    pub(super) fn new(raw: &RawRecord, worker: Option<u16>) -> Option<Self> {
        Some(Self {
            time_ns: raw.time_ns,
            kind: Kind::from_byte(raw.kind)?,
            worker,
            controller: raw.controller,
            qid: raw.qid,
            value: raw.value,
            extra: raw.extra,
        })
    }

    /// Queue of the record; `None` if it is about an I/O thread or a controller.
    #[must_use]
    pub fn queue(&self) -> Option<Queue> {
        let id = self.qid & !COMPLETION_QUEUE;
        match self.kind.subject() {
            Subject::Whole => None,
            Subject::CompletionQueue => Some(Queue::Completion(id)),
            Subject::Queue if self.qid & COMPLETION_QUEUE != 0 => Some(Queue::Completion(id)),
            Subject::Queue | Subject::SubmissionQueue => Some(Queue::Submission(id)),
        }
    }

    /// `value` and `extra` with their names, for machine-readable output.
    #[must_use]
    pub fn fields(&self) -> Vec<(&'static str, u32)> {
        let (value, extra) = (self.value, self.extra);
        match self.kind {
            Kind::MmioWrite | Kind::Invalid => vec![("value", value)],
            Kind::ShadowNew => vec![("from", extra), ("to", value)],
            Kind::EventIdxMoved | Kind::EventIdxArmed => vec![("event_idx", value)],
            Kind::Wake => vec![("slept_us", value)],
            Kind::InterruptRaised => vec![("tail", value), ("vector", extra)],
            Kind::InterruptSuppressed | Kind::CqFull => vec![("tail", value)],
            Kind::Batch => vec![("commands", extra), ("tail", value)],
            Kind::QueueCreated if self.qid & COMPLETION_QUEUE == 0 => {
                vec![("entries", value), ("completes_to", extra)]
            }
            Kind::QueueCreated => vec![("entries", value), ("vector", extra)],
            Kind::CommandSeen => vec![("cid", value), ("opcode", extra)],
            Kind::CompletionPosted => {
                vec![("cid", value & 0xffff), ("sqid", value >> 16), ("status", extra)]
            }
            Kind::Sleep
            | Kind::SpuriousWake
            | Kind::Reset
            | Kind::ShadowConfigured
            | Kind::QueueDeleted
            | Kind::DoorbellEvent => Vec::new(),
        }
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, nanos) = (self.time_ns / 1_000_000_000, self.time_ns % 1_000_000_000);
        write!(f, "{seconds:>6}.{nanos:09}  ")?;
        match self.worker {
            Some(worker) => write!(f, "worker {worker:<3}")?,
            None => f.write_str("control   ")?,
        }
        let controller = match self.controller {
            0 => String::new(),
            controller => format!("controller {controller}"),
        };
        let queue = self.queue().map(|queue| queue.to_string()).unwrap_or_default();
        write!(f, "  {controller:<14}  {queue:<5}  {}", self.kind.name())?;
        let (value, extra) = (self.value, self.extra);
        match self.kind {
            Kind::MmioWrite | Kind::Invalid => write!(f, ": {value}"),
            Kind::ShadowNew => write!(f, ": {extra} -> {value}"),
            Kind::EventIdxMoved | Kind::EventIdxArmed => write!(f, ": {value}"),
            Kind::Wake => write!(f, " after {value} us"),
            Kind::InterruptRaised => write!(f, ": tail {value}, vector {extra}"),
            Kind::InterruptSuppressed | Kind::CqFull => write!(f, ": tail {value}"),
            Kind::Batch => write!(f, ": {extra}, tail {value}"),
            Kind::QueueCreated if self.qid & COMPLETION_QUEUE == 0 => {
                write!(f, ": {value} entries, CQ {extra}")
            }
            Kind::QueueCreated => write!(f, ": {value} entries, vector {extra}"),
            Kind::CommandSeen => write!(f, ": {value}, opcode {extra:#04x}"),
            Kind::CompletionPosted => {
                let (cid, sqid) = (value & 0xffff, value >> 16);
                write!(f, ": {cid} of SQ {sqid}, status {extra:#x}")
            }
            Kind::Sleep
            | Kind::SpuriousWake
            | Kind::Reset
            | Kind::ShadowConfigured
            | Kind::QueueDeleted
            | Kind::DoorbellEvent => Ok(()),
        }
    }
}

/// Header of a trace file.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub(super) struct Header {
    /// [`MAGIC`].
    pub(super) magic: [u8; 8],
    /// [`VERSION`].
    pub(super) version: u32,
    /// Bytes per record: 32.
    pub(super) record_bytes: u32,
    /// Number of rings; the last one is the control plane's.
    pub(super) rings: u32,
    /// Records per ring, a power of two.
    pub(super) capacity: u32,
    /// Start time in nanoseconds since 1 January 1970, UTC.
    pub(super) started: u64,
    pub(super) reserved: [u8; 32],
}

pub(super) const MAGIC: [u8; 8] = *b"SBTRACE\x01";
pub(super) const VERSION: u32 = 1;
pub(super) const HEADER_BYTES: usize = size_of::<Header>();
/// Size in bytes of the file area with the record count of one ring.
const COUNT_BYTES: usize = 64;
/// Alignment of rings in the file, in bytes.
pub(super) const PAGE: u64 = 4096;
/// Maximum number of rings, which exceeds the number of threads in any pool.
pub(super) const MAX_RINGS: u32 = 1024;
/// Maximum size of a trace file, written or read: 1 GiB.
const MAX_BYTES: u64 = 1 << 30;

/// Layout of a trace file. Its size was checked against [`MAX_BYTES`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) rings: u32,
    pub(super) capacity: u32,
}

impl Layout {
    pub(super) fn new(rings: u32, capacity: u32) -> Option<Self> {
        let layout = Self { rings, capacity };
        let sane = (1..=MAX_RINGS).contains(&rings) && capacity >= 2 && capacity.is_power_of_two();
        (sane && layout.bytes() <= MAX_BYTES).then_some(layout)
    }

    /// File offset of the record count of ring `index`.
    pub(super) fn count(index: u32) -> u64 {
        HEADER_BYTES as u64 + u64::from(index) * COUNT_BYTES as u64
    }

    /// File offset of the records of ring `index`.
    pub(super) fn records(self, index: u32) -> u64 {
        Self::count(self.rings).next_multiple_of(PAGE) + u64::from(index) * self.ring_bytes()
    }

    pub(super) fn ring_bytes(self) -> u64 {
        u64::from(self.capacity) * RECORD_BYTES as u64
    }

    /// Size of the file in bytes.
    pub(super) fn bytes(self) -> u64 {
        self.records(self.rings)
    }
}
