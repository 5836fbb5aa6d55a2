//! Messages from the control plane to an I/O thread. A thread reads its messages between two passes
//! over its queues, so no lock is taken while commands are served.

use super::queue_override::QueueOverride;
use super::relocation::{Departure, Relocated};
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

/// Context that an I/O thread needs to serve a controller's first queue.
pub(crate) struct QueueContext {
    pub(crate) shared: Arc<ControllerShared>,
    pub(crate) control: ControlHandle,
    pub(crate) table: Arc<DmaTable>,
    pub(crate) namespaces: Arc<Namespaces>,
    /// CC.MPS in bytes.
    pub(crate) page_size: usize,
    /// MDTS in bytes.
    pub(crate) max_transfer: usize,
    /// In-flight limits.
    pub(crate) quota: Quota,
    /// Number of controller resets so far.
    pub(crate) generation: u64,
    /// Shadow Doorbell and EventIdx buffers, if Doorbell Buffer Config is enabled.
    pub(crate) shadow: Option<(u64, u64)>,
    /// Override that serves the queues instead, if any.
    pub(crate) overriding: Option<Box<dyn QueueOverride>>,
}

pub(crate) enum Message {
    /// Doorbell write of a parked controller (see `poll_group`).
    DoorbellWritten {
        controller: u32,
    },
    /// Registration of an eventfd that signals doorbell writes of the controller.
    DoorbellEventfd {
        controller: u32,
        event: EventFd,
    },
    /// Registration of a source from which the thread receives the host's doorbell writes itself.
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
    /// Stops the queue, aborts commands in flight, deletes the queue, then releases the latch.
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
    /// Enables Doorbell Buffer Config, or disables it (`None`).
    Shadow {
        controller: u32,
        pages: Option<(u64, u64)>,
        latch: Latch,
    },
    /// Replaces the DMA map; the latches are released once nothing uses the old one.
    Table {
        controller: u32,
        table: Arc<DmaTable>,
        latches: Vec<Latch>,
    },
    /// Changes namespace `nsid` to the one in `namespaces`, or removes it. The latch is released
    /// once nothing uses the old disk. If the new disk cannot be opened, nothing changes and the
    /// latch gets a status.
    ChangeNamespace {
        controller: u32,
        nsid: u32,
        namespaces: Arc<Namespaces>,
        latch: Latch,
    },
    /// Applies a change of the controller's access to a namespace. The latch is released when the
    /// commands in flight on it have ended; they are aborted if `aborts` is true.
    ReviewAccess {
        controller: u32,
        uuid: [u8; 16],
        aborts: bool,
        latch: Latch,
    },
    /// Ends a reservation command.
    ReservationEnded {
        controller: u32,
        ticket: u64,
        status: Status,
    },
    /// Flushes every namespace.
    Flush {
        context: Box<QueueContext>,
        latch: Latch,
    },
    /// Verifies a piece of a namespace. The latch gets the status of an error.
    Verify {
        context: Box<QueueContext>,
        piece: Piece,
        latch: Latch,
    },
    /// Aborts a command. The latch gets the status Command Abort Requested if it was aborted.
    Abort {
        controller: u32,
        sqid: u16,
        cid: u16,
        latch: Latch,
    },
    /// Controller reset: drops shadow pages at once, aborts commands in flight, deletes all queues,
    /// then releases the latch.
    Detach {
        controller: u32,
        latch: Latch,
    },
    /// Moves the controller's queues to another I/O thread once nothing is in flight. Until the
    /// latch is released, the route holds back further messages about the controller, except
    /// [`Stay`](Self::Stay), [`Hurry`](Self::Hurry) and those of exclusive execution.
    Leave {
        controller: u32,
        departure: Departure,
    },
    /// Cancels a move that has not happened yet.
    Stay {
        controller: u32,
    },
    /// Stops fetching. The latch is released when nothing is in flight except commands that wait
    /// for exclusive execution.
    Pause {
        controller: u32,
        latch: Latch,
    },
    /// Executes parked commands exclusively, then releases the latch.
    Alone {
        controller: u32,
        latch: Latch,
    },
    /// Reports that changes are recorded. The latch is released when the journal says so.
    Settle {
        controller: u32,
        latch: Latch,
    },
    /// Ends exclusive execution: fetching continues.
    GoOn {
        controller: u32,
    },
    /// Aborts the commands in flight of a controller that is about to move.
    Hurry {
        controller: u32,
    },
    /// Delivers a controller's queues from another I/O thread.
    Arrive(Box<Relocated>),
    /// Sets an override that serves the controller's queues from now on.
    Override {
        controller: u32,
        overriding: Box<dyn QueueOverride>,
    },
    /// Starts recording in this ring, or stops.
    Trace(Option<TraceRing>),
    /// Starts or stops the measurement of command latencies.
    Measure(bool),
    /// Liveness check: the thread drops the message.
    Visit(Visit),
    Stop,
}

impl Message {
    /// Number of the controller that the message is about.
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
            | Self::Stay { controller }
            | Self::Override { controller, .. } => Some(*controller),
            Self::Arrive(relocated) => Some(relocated.id()),
            Self::Trace(_) | Self::Measure(_) | Self::Visit(_) | Self::Stop => None,
        }
    }
}
