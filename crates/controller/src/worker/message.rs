//! What the control plane tells a worker. A worker reads its messages between two passes over its
//! queues, so no lock is ever taken while commands are served.

use super::queue_override::QueueOverride;
use super::relocation::{Departure, Relocated};
use super::worker_thread::ThreadJob;
use crate::admin::self_test::Piece;
use crate::doorbell_source::DoorbellSource;
use crate::exec::Quota;
use crate::latch::Latch;
use crate::namespace::Namespaces;
use crate::notice::ControlHandle;
use crate::queue::QueueLayout;
use crate::shared::ControllerShared;
use crate::trace::TraceRing;
use crate::visit::Visit;
use shadowbell_memory::{DmaTable, EventFd};
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// What a worker needs to know of a controller before it serves its first queue.
pub(crate) struct QueueContext {
    pub(crate) shared: Arc<ControllerShared>,
    pub(crate) control: ControlHandle,
    pub(crate) table: Arc<DmaTable>,
    pub(crate) namespaces: Arc<Namespaces>,
    /// CC.MPS in bytes.
    pub(crate) page_size: usize,
    /// MDTS in bytes.
    pub(crate) max_transfer: usize,
    /// How much it may have under way.
    pub(crate) quota: Quota,
    /// Resets that there have been.
    pub(crate) generation: u64,
    /// The Shadow Doorbell and the EventIdx buffer, if Doorbell Buffer Config is in force.
    pub(crate) shadow: Option<(u64, u64)>,
    /// What serves the queues instead, if anything does.
    pub(crate) overriding: Option<Box<dyn QueueOverride>>,
}

pub(crate) enum Message {
    /// A doorbell was written of a controller that is parked (see `poll_group`).
    DoorbellWritten {
        controller: u32,
    },
    /// From now on, whoever signals `event` wants the controller's doorbells to be looked at.
    DoorbellEventfd {
        controller: u32,
        event: EventFd,
    },
    /// From now on, the worker takes the host's doorbell writes by itself.
    DoorbellSource {
        controller: u32,
        source: Box<dyn DoorbellSource>,
    },
    CreateCq {
        context: Box<QueueContext>,
        layout: QueueLayout,
        vector: Option<u16>,
        latch: Latch,
    },
    CreateSq {
        controller: u32,
        layout: QueueLayout,
        cqid: u16,
        latch: Latch,
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
    /// Doorbell Buffer Config, or the end of it.
    Shadow {
        controller: u32,
        pages: Option<(u64, u64)>,
        latch: Latch,
    },
    /// Another DMA map; the latches are dropped once nothing uses the old one.
    Table {
        controller: u32,
        table: Arc<DmaTable>,
        latches: Vec<Latch>,
    },
    /// Namespace `nsid` is another one, or none: that of these. The latch is dropped once nothing
    /// uses the disk of the one before. It gets a status if the new disk can not be opened, and
    /// then all is as it was.
    ChangeNamespace {
        controller: u32,
        nsid: u32,
        namespaces: Arc<Namespaces>,
        latch: Latch,
    },
    /// The controller may do something else with a namespace. The latch is dropped when what is
    /// under way there has ended, which is given up if this `aborts`.
    ReviewAccess {
        controller: u32,
        uuid: [u8; 16],
        aborts: bool,
        latch: Latch,
    },
    /// A reservation command is over.
    ReservationEnded {
        controller: u32,
        ticket: u64,
        status: Status,
    },
    /// Flush every namespace.
    Flush {
        context: Box<QueueContext>,
        latch: Latch,
    },
    /// Verify a piece of a namespace. The latch gets the status of an error.
    Verify {
        context: Box<QueueContext>,
        piece: Piece,
        latch: Latch,
    },
    /// The latch gets the status Command Abort Requested if the command is aborted.
    Abort {
        controller: u32,
        sqid: u16,
        cid: u16,
        latch: Latch,
    },
    /// Controller reset: shadow pages dropped at once, then commands in flight given up, then
    /// everything forgotten; then drops the latch.
    Detach {
        controller: u32,
        latch: Latch,
    },
    /// Has the controller go to another worker, once nothing of it is under way. From here on until
    /// the latch is dropped, nobody sends anything about the controller but
    /// [`Hurry`](Self::Hurry).
    Leave {
        controller: u32,
        departure: Departure,
    },
    /// A controller that was to leave stays, unless it has left.
    Stay {
        controller: u32,
    },
    /// Nothing more of the controller is fetched. The latch is dropped when nothing is under way
    /// but what has to be alone.
    Pause {
        controller: u32,
        latch: Latch,
    },
    /// What has to be alone is carried out; then the latch is dropped.
    Alone {
        controller: u32,
        latch: Latch,
    },
    /// What has changed is recorded. The latch is dropped when that is written down.
    Settle {
        controller: u32,
        latch: Latch,
    },
    /// Commands are fetched again.
    GoOn {
        controller: u32,
    },
    /// What is under way of a controller that is to leave is to be given up.
    Hurry {
        controller: u32,
    },
    /// A controller comes from another worker.
    Arrive(Box<Relocated>),
    /// From now on, something else serves the controller's queues.
    Override {
        controller: u32,
        overriding: Box<dyn QueueOverride>,
    },
    /// Record in this ring from here on, or nothing more.
    Trace(Option<TraceRing>),
    /// Measure how long commands take from here on, or do so no more.
    Measure(bool),
    /// The thread is lent to this, by a controller.
    Run {
        controller: u32,
        job: ThreadJob,
    },
    /// Somebody wants to know whether the worker comes to its messages: it drops this.
    Visit(Visit),
    Stop,
}

impl Message {
    /// The controller that it is about.
    pub(crate) fn controller(&self) -> Option<u32> {
        match self {
            Self::CreateCq { context, .. }
            | Self::Flush { context, .. }
            | Self::Verify { context, .. } => Some(context.shared.id),
            Self::DoorbellWritten { controller }
            | Self::DoorbellEventfd { controller, .. }
            | Self::DoorbellSource { controller, .. }
            | Self::CreateSq { controller, .. }
            | Self::DeleteSq { controller, .. }
            | Self::DeleteCq { controller, .. }
            | Self::Shadow { controller, .. }
            | Self::Table { controller, .. }
            | Self::ChangeNamespace { controller, .. }
            | Self::ReviewAccess { controller, .. }
            | Self::ReservationEnded { controller, .. }
            | Self::Abort { controller, .. }
            | Self::Detach { controller, .. }
            | Self::Pause { controller, .. }
            | Self::Alone { controller, .. }
            | Self::Settle { controller, .. }
            | Self::GoOn { controller }
            | Self::Leave { controller, .. }
            | Self::Hurry { controller }
            | Self::Run { controller, .. }
            | Self::Stay { controller }
            | Self::Override { controller, .. } => Some(*controller),
            Self::Arrive(relocated) => Some(relocated.id()),
            Self::Trace(_) | Self::Measure(_) | Self::Visit(_) | Self::Stop => None,
        }
    }
}
