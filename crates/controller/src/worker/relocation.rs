//! Queues on their way from one worker to another.

use super::queue_override::QueueOverride;
use crate::exec::{Engine, NamespaceQueue, Quota};
use crate::latch::Latch;
use crate::namespace::Namespace;
use crate::notice::ControlHandle;
use crate::queue::{Cq, Sq};
use crate::shared::ControllerShared;
use crate::stats::IoCounters;
use shadowbell_memory::{DmaTable, EventFd, View};
use std::sync::Arc;

/// What the namespaces of a controller are opened from.
#[derive(Clone)]
pub(super) struct Opening {
    pub(super) namespaces: Arc<Vec<Namespace>>,
    pub(super) page_size: usize,
    pub(super) max_transfer: usize,
    pub(super) quota: Quota,
}

impl Opening {
    /// Opens the namespaces for this thread.
    pub(super) fn open(
        &self,
        table: Arc<DmaTable>,
        counters: Arc<IoCounters>,
    ) -> Result<Engine, std::io::Error> {
        let Self { namespaces, page_size, max_transfer, quota } = self;
        let namespaces = namespaces.iter().map(NamespaceQueue::open).collect::<Result<_, _>>()?;
        Ok(Engine::new(View::new(table), *page_size, *max_transfer, *quota, namespaces, counters))
    }
}

/// Where a controller is to go.
pub(crate) struct Departure {
    pub(crate) to: Destination,
    /// Is dropped when it has arrived.
    pub(crate) latch: Latch,
}

/// A worker that a controller goes to.
#[derive(Clone)]
pub(crate) struct Destination {
    /// Its number in the pool.
    pub(crate) worker: usize,
    pub(crate) arrivals: Arc<dyn Arrivals>,
}

/// Where queues arrive.
pub(crate) trait Arrivals: Send + Sync {
    /// Hands them over.
    fn deliver(&self, queues: Box<Relocated>);
}

/// The queues of one controller on their way from one worker to another. Nothing of them is under
/// way at a disk.
pub(crate) struct Relocated {
    pub(super) shared: Arc<ControllerShared>,
    pub(super) control: ControlHandle,
    pub(super) opening: Opening,
    pub(super) table: Arc<DmaTable>,
    pub(super) counters: Arc<IoCounters>,
    pub(super) shadow: Option<(u64, u64)>,
    pub(super) sqs: Vec<Option<Sq>>,
    pub(super) cqs: Vec<Option<Cq>>,
    pub(super) overriding: Option<Box<dyn QueueOverride>>,
    pub(super) doorbell_eventfds: Vec<EventFd>,
    pub(super) losses: u64,
    pub(super) lost: bool,
    pub(super) latch: Latch,
}

impl Relocated {
    /// The controller's number.
    pub(crate) fn id(&self) -> u32 {
        self.shared.id
    }

    /// Descriptors that stand for doorbells.
    pub(crate) fn doorbell_eventfds(&self) -> &[EventFd] {
        &self.doorbell_eventfds
    }

    /// The way to the control plane.
    pub(crate) fn control(&self) -> &ControlHandle {
        &self.control
    }
}
