//! What the control plane tells a worker. A worker reads its messages between two passes over its
//! queues, so no lock is ever taken while commands are served.

use crate::doorbell_source::DoorbellSource;
use crate::latch::Latch;
use crate::namespace::Namespace;
use crate::shared::Shared;
use crate::stats::{CqStats, IoStats, SleepStats, SqStats};
use crate::trace::TraceRing;
use crate::worker::queue::Placement;
use crate::worker::{Service, Watch};
use shadowbell_memory::{DmaTable, EventFd};
use shadowbell_spec::status::Status;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};

/// Answers whether a queue was created.
pub(crate) type Reply = Box<dyn FnOnce(Result<(), Status>) + Send>;

/// Answers whether a command was aborted; "no" if it is dropped.
pub(crate) struct AbortReply(Option<Box<dyn FnOnce(bool) + Send>>);

impl AbortReply {
    pub(crate) fn new(then: impl FnOnce(bool) + Send + 'static) -> Self {
        Self(Some(Box::new(then)))
    }

    pub(crate) fn answer(mut self, aborted: bool) {
        if let Some(then) = self.0.take() {
            then(aborted);
        }
    }
}

impl Drop for AbortReply {
    fn drop(&mut self) {
        if let Some(then) = self.0.take() {
            then(false);
        }
    }
}

impl fmt::Debug for AbortReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AbortReply")
    }
}

/// What a worker needs to know of a controller before it serves its first queue.
#[derive(Clone)]
pub(crate) struct Seed {
    pub(crate) shared: Arc<Shared>,
    pub(crate) table: Arc<DmaTable>,
    pub(crate) namespaces: Arc<Vec<Namespace>>,
    /// CC.MPS in bytes.
    pub(crate) page_size: usize,
    /// MDTS in bytes.
    pub(crate) max_transfer: usize,
    /// The Shadow Doorbell and the EventIdx buffer, if Doorbell Buffer Config is in force.
    pub(crate) shadow: Option<(u64, u64)>,
}

/// One worker's answer to a query.
#[derive(Clone, Debug, Default)]
pub(crate) struct WorkerStats {
    pub(crate) sqs: Vec<SqStats>,
    pub(crate) cqs: Vec<CqStats>,
    pub(crate) io: IoStats,
    /// Doorbells rung by a descriptor.
    pub(crate) events: u64,
    pub(crate) sleep: SleepStats,
}

pub(crate) enum Message {
    /// A doorbell was rung of a controller that is parked (see `roster`).
    Rung {
        controller: u32,
    },
    /// From now on, whoever signals `event` wants the controller's doorbells to be looked at.
    Kick {
        controller: u32,
        event: EventFd,
    },
    /// From now on, the worker hears the controller's host by itself.
    DoorbellSource {
        controller: u32,
        source: Box<dyn DoorbellSource>,
    },
    CreateCq {
        seed: Box<Seed>,
        place: Placement,
        vector: Option<u16>,
        reply: Reply,
    },
    CreateSq {
        controller: u32,
        place: Placement,
        cqid: u16,
        reply: Reply,
    },
    /// Stops the queue, gives up what is in flight, and forgets it; then drops the latch.
    DeleteSq {
        controller: u32,
        qid: u16,
        latch: Latch,
    },
    DeleteCq {
        controller: u32,
        qid: u16,
        latch: Latch,
    },
    /// Doorbell Buffer Config.
    Shadow {
        controller: u32,
        pages: (u64, u64),
        latch: Latch,
    },
    /// Another DMA map; the latches are dropped once nothing uses the old one.
    Table {
        controller: u32,
        table: Arc<DmaTable>,
        latches: Vec<Latch>,
    },
    /// Flush every namespace.
    Flush {
        controller: u32,
        latch: Latch,
    },
    Abort {
        controller: u32,
        sqid: u16,
        cid: u16,
        reply: AbortReply,
    },
    Query {
        controller: u32,
        gather: Arc<Mutex<Vec<WorkerStats>>>,
        latch: Latch,
    },
    /// Controller reset: shadow pages dropped at once, then commands in flight given up, then
    /// everything forgotten; then drops the latch.
    Detach {
        controller: u32,
        latch: Latch,
    },
    /// Look at the admin doorbells in every pass: they are mapped.
    Watch(Watch),
    /// Serve an admin queue that had more to do than one turn.
    Service(Weak<dyn Service>),
    /// Start tracing.
    Trace(TraceRing),
    Stop,
}
