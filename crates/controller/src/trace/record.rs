//! One record of a trace: as it lies in the file, and as a person reads it.

use std::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of a record in the file.
pub(super) const RECORD_BYTES: usize = 32;

/// A bit of [`Record::qid`]: the queue is a completion queue, and the doorbell its head. Queue
/// identifiers are at most 64, so it is free.
pub const COMPLETION_QUEUE: u16 = 1 << 15;

/// A record, as it lies in the file.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub(super) struct RawRecord {
    /// Nanoseconds since the trace began.
    pub(super) time_ns: u64,
    /// How many records were in the ring before this one: tells a reader whether it is the one
    /// that it expects here.
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
        /// What was recorded. Each variant says what `value` and `extra` are.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Kind {
            $($(#[doc = $doc])* $kind = $value,)*
        }

        impl Kind {
            /// Every kind, in the order of its number.
            pub const ALL: &[Self] = &[$(Self::$kind),*];

            /// What a person calls it.
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
    /// A doorbell register was written by a trapped access. `value`: what was written.
    MmioWrite = 1, "MMIO write";
    /// A look at a shadow doorbell found a new value. `value`: it; `extra`: the one before.
    ShadowNew = 2, "shadow doorbell moved";
    /// EventIdx was moved out of the host's way. `value`: where to.
    EventIdxMoved = 3, "EventIdx moved";
    /// EventIdx was set so that the host's next update rings. `value`: where to.
    EventIdxArmed = 4, "EventIdx armed";
    /// A worker goes to sleep.
    Sleep = 5, "sleep";
    /// A worker woke up. `value`: how long it slept, in microseconds.
    Wake = 6, "wake";
    /// A worker woke up and found nothing to do.
    SpuriousWake = 7, "spurious wake";
    /// An interrupt was raised for a completion queue. `value`: its tail; `extra`: the vector.
    InterruptRaised = 8, "interrupt raised";
    /// Completions were posted to a completion queue and no interrupt was raised for them. `value`:
    /// its tail.
    InterruptSuppressed = 9, "interrupt suppressed";
    /// Commands were fetched from a submission queue. `value`: its tail; `extra`: how many.
    Batch = 10, "batch fetched";
    /// Fetching stopped for want of room in a completion queue. `value`: its tail.
    CqFull = 11, "completion queue full";
    /// A doorbell had a value that can not be. `value`: it.
    Invalid = 12, "invalid doorbell value";
    /// The controller was reset.
    Reset = 13, "controller reset";
    /// Doorbell Buffer Config: the queues have shadow doorbells from now on.
    ShadowConfigured = 14, "shadow doorbells configured";
    /// A queue was created. `value`: its size in entries; `extra`: for a submission queue its
    /// completion queue, for a completion queue its vector.
    QueueCreated = 15, "queue created";
    /// A queue was deleted.
    QueueDeleted = 16, "queue deleted";
    /// A worker that went to sleep found that an eventfd which stands for a controller's doorbells
    /// was signalled, then or since it slept last.
    DoorbellEvent = 17, "doorbell eventfd signalled";
    /// A look at a submission queue's tail found this command. `value`: its command identifier;
    /// `extra`: its opcode.
    CommandSeen = 18, "command seen";
    /// A completion was posted to a completion queue. `value`: the command identifier, and above
    /// its 16 bits the submission queue; `extra`: the status field, without the phase tag.
    CompletionPosted = 19, "completion posted";
}

/// What a kind of record is about.
enum Subject {
    /// A worker or a controller.
    Whole,
    /// Either kind of queue: [`COMPLETION_QUEUE`] tells.
    Queue,
    SubmissionQueue,
    CompletionQueue,
}

/// The queue that a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Queue {
    /// A submission queue, by its identifier.
    Submission(u16),
    /// A completion queue, by its identifier.
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

/// A record of a trace. Printed, it is a line for a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Nanoseconds since the trace began.
    pub time_ns: u64,
    /// What happened.
    pub kind: Kind,
    /// Which worker recorded it, from 0; `None` for the control plane.
    pub worker: Option<u16>,
    /// Which controller it was about, from 1; 0 if it was about the worker alone.
    pub controller: u16,
    /// Which queue, 0 for the admin queue; with [`COMPLETION_QUEUE`] for a completion queue, where
    /// the kind does not say so.
    pub qid: u16,
    /// See [`Kind`].
    pub value: u32,
    /// See [`Kind`].
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

    /// Which queue it is about; `None` if it is about a worker or a controller.
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

    /// What `value` and `extra` are, by their names: for machines.
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
