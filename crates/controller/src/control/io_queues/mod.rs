//! Records of the existing I/O queues and the I/O threads that serve them.

mod create_delete;
mod handover;

use super::memory::HostMemory;
use super::registers::Registers;
use crate::admin::self_test::Piece;
use crate::context::Context;
use crate::notice::{Notice, Operation};
use crate::queue::QueueLayout;
use crate::shared::DSTRD;
use crate::worker::mailbox::{Message, QueueContext};
use crate::worker::queue_set::QueueOverride;
use shadowbell_memory::EventFd;
use shadowbell_spec::regs::{DoorbellKind, cq_doorbell_offset, sq_doorbell_offset};
use shadowbell_spec::status::Status;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

/// Eventfds that replace doorbell writes.
///
/// With shadow doorbells, a host rings only to wake a sleeping I/O thread, and the value that it
/// writes is not used. An eventfd can therefore replace the write: the signal reaches the I/O
/// thread directly, without a message to the carrier and a wakeup of the carrier's thread.
///
/// Each controller has its own eventfd per I/O thread. A holder of an eventfd can also read it, and
/// would otherwise steal the wakeups of other controllers.
#[derive(Debug, Default)]
pub struct DoorbellEventfds {
    /// Eventfds; a signal has the I/O thread read the doorbells.
    pub events: Vec<EventFd>,
    /// Doorbells by offset in BAR0, with the index of the eventfd.
    pub doorbells: Vec<(u64, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueState {
    Creating,
    Live,
    Deleting,
}

/// Record of a submission queue.
#[derive(Clone, Copy, Debug)]
struct SqRecord {
    layout: QueueLayout,
    cqid: u16,
    worker: usize,
    state: QueueState,
}

/// Record of a completion queue.
#[derive(Clone, Copy, Debug)]
struct CqRecord {
    layout: QueueLayout,
    vector: Option<u16>,
    worker: usize,
    state: QueueState,
}

impl SqRecord {
    /// True if the queue exists for the host: created, and not reported as deleted.
    fn exists(&self) -> bool {
        self.state != QueueState::Creating
    }
}

impl CqRecord {
    /// True if the queue exists for the host: created, and not reported as deleted.
    fn exists(&self) -> bool {
        self.state != QueueState::Creating
    }
}

/// Controller state on which the creation of a queue depends.
pub(super) struct QueueEnvironment<'a> {
    pub(super) registers: &'a Registers,
    pub(super) memory: &'a HostMemory,
    /// Number of resets so far.
    pub(super) generation: u64,
}

impl QueueEnvironment<'_> {
    /// Controller state for an I/O thread.
    fn context(
        &self,
        cx: &Context,
        overriding: Option<Box<dyn QueueOverride>>,
    ) -> Box<QueueContext> {
        Box::new(QueueContext {
            shared: Arc::clone(&cx.shared),
            control: cx.control.clone(),
            table: Arc::clone(self.memory.table()),
            namespaces: cx.visible(),
            page_size: self.registers.page_size(),
            max_transfer: 4096usize << cx.config.mdts,
            quota: cx.config.quota,
            generation: self.generation,
            shadow: self.memory.shadow,
            overriding,
        })
    }
}

/// Records of the existing I/O queues.
pub(super) struct IoQueues {
    sqs: BTreeMap<u16, SqRecord>,
    cqs: BTreeMap<u16, CqRecord>,
    /// Numbers of submission and completion queues that the host may create (feature 07h).
    granted: (u16, u16),
    /// I/O threads that have had queues of this controller since the last reset.
    workers: BTreeSet<usize>,
    /// Doorbell eventfds by I/O thread.
    doorbell_eventfds: BTreeMap<usize, EventFd>,
}

impl IoQueues {
    /// Without queues, and with limits of `io_queues` of each kind.
    pub(super) fn new(io_queues: u16) -> Self {
        Self {
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            granted: (io_queues, io_queues),
            workers: BTreeSet::new(),
            doorbell_eventfds: BTreeMap::new(),
        }
    }

    /// I/O threads that have had queues of this controller since the last reset.
    pub(super) fn workers(&self) -> impl Iterator<Item = usize> {
        self.workers.iter().copied()
    }

    /// Clears the I/O threads, after all have detached the controller.
    pub(super) fn forget_workers(&mut self) {
        self.workers.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sqs.is_empty() && self.cqs.is_empty()
    }

    /// True if a submission queue exists.
    pub(super) fn has_sqs(&self) -> bool {
        !self.sqs.is_empty()
    }

    /// True if no queue is being created or deleted.
    pub(super) fn is_quiet(&self) -> bool {
        self.sqs.values().all(|sq| sq.state == QueueState::Live)
            && self.cqs.values().all(|cq| cq.state == QueueState::Live)
    }

    /// Numbers of submission and completion queues that the host may create.
    pub(super) fn granted(&self) -> (u16, u16) {
        self.granted
    }

    /// Addresses and numbers of entries of the completion queues.
    pub(super) fn completion_queues(&self) -> impl Iterator<Item = (u64, u32)> {
        self.cqs.values().map(|cq| (cq.layout.iova, cq.layout.size.entries()))
    }

    /// Sets feature 07h, Number of Queues.
    pub(super) fn grant(&mut self, submission: u16, completion: u16) {
        self.granted = (submission, completion);
    }

    /// I/O thread at which submission queue `sqid` was placed.
    pub(super) fn worker_of(&self, sqid: u16) -> Option<usize> {
        self.sqs.get(&sqid).map(|sq| sq.worker)
    }

    /// Has an I/O thread flush all namespaces. Queues need not exist, because writes through
    /// deleted queues are flushed as well. The controller has to be enabled. `operation` ends with
    /// the flush.
    pub(super) fn flush(
        &mut self,
        cx: &Context,
        env: &QueueEnvironment<'_>,
        operation: Operation,
        overriding: Option<Box<dyn QueueOverride>>,
    ) {
        let worker = self.workers().next().unwrap_or_else(|| cx.pool.least_loaded());
        self.workers.insert(worker);
        let latch = cx.latch(ended(env.generation, operation));
        let context = env.context(cx, overriding);
        cx.send(worker, Message::Flush { context, latch });
    }

    /// Has an I/O thread verify a piece of a namespace. Conditions as for [`flush`](Self::flush).
    pub(super) fn verify(
        &mut self,
        cx: &Context,
        env: &QueueEnvironment<'_>,
        piece: Piece,
        operation: Operation,
        overriding: Option<Box<dyn QueueOverride>>,
    ) {
        let worker = self.workers().next().unwrap_or_else(|| cx.pool.least_loaded());
        self.workers.insert(worker);
        let latch = cx.latch(ended(env.generation, operation));
        let context = env.context(cx, overriding);
        cx.send(worker, Message::Verify { context, piece, latch });
    }

    /// Drops the doorbell eventfds at the start of a reset.
    pub(super) fn drop_eventfds(&mut self) {
        self.doorbell_eventfds.clear();
    }

    /// Removes all queues at the end of a reset.
    pub(super) fn reset(&mut self, cx: &Context) {
        for qid in std::mem::take(&mut self.sqs).into_keys() {
            cx.shared.set_owner(qid, DoorbellKind::Sq, None);
        }
        for (qid, record) in std::mem::take(&mut self.cqs) {
            cx.shared.set_owner(qid, DoorbellKind::Cq, None);
            cx.pool.unplace(record.worker);
        }
        self.workers.clear();
        self.granted = (cx.config.io_queues, cx.config.io_queues);
    }

    /// Doorbell eventfds of the live queues.
    ///
    /// # Errors
    /// The error of the system if it has no more descriptors.
    pub(super) fn doorbell_eventfds(&mut self, cx: &Context) -> io::Result<DoorbellEventfds> {
        let sqs =
            self.sqs.values().map(|q| (q.state, q.worker, sq_doorbell_offset(q.layout.qid, DSTRD)));
        let cqs =
            self.cqs.values().map(|q| (q.state, q.worker, cq_doorbell_offset(q.layout.qid, DSTRD)));
        let live: Vec<_> =
            sqs.chain(cqs).filter(|(state, ..)| *state == QueueState::Live).collect();
        let mut found = DoorbellEventfds::default();
        let mut indices = BTreeMap::new();
        for (_, worker, offset) in live {
            let index = match indices.get(&worker) {
                Some(index) => *index,
                None => {
                    found.events.push(self.doorbell_eventfd(cx, worker)?);
                    indices.insert(worker, found.events.len() - 1);
                    found.events.len() - 1
                }
            };
            found.doorbells.push((offset, index));
        }
        Ok(found)
    }

    /// Doorbell eventfd of this controller on I/O thread `worker`, created if necessary.
    fn doorbell_eventfd(&mut self, cx: &Context, worker: usize) -> io::Result<EventFd> {
        if let Some(event) = self.doorbell_eventfds.get(&worker) {
            return event.try_clone();
        }
        let event = EventFd::new()?;
        let (ours, theirs) = (event.try_clone()?, event.try_clone()?);
        let controller = cx.shared.id;
        cx.send(worker, Message::DoorbellEventfd { controller, event: theirs });
        self.doorbell_eventfds.insert(worker, ours);
        Ok(event)
    }
}

/// Notice of an operation's end. I/O threads may change its status, which is success initially.
pub(super) fn ended(generation: u64, operation: Operation) -> Notice {
    Notice::Ended { generation, operation, status: Status::SUCCESS }
}
