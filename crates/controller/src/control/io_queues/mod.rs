//! The I/O queues that exist, and who serves them.

mod create_delete;
mod handover;

use super::memory::HostMemory;
use super::registers::Registers;
use crate::admin::self_test::Piece;
use crate::context::Context;
use crate::notice::{Notice, Operation};
use crate::queue::QueueLayout;
use crate::shared::DSTRD;
use crate::worker::message::{Message, QueueContext};
use crate::worker::queue_override::QueueOverride;
use shadowbell_memory::EventFd;
use shadowbell_spec::regs::{DoorbellKind, cq_doorbell_offset, sq_doorbell_offset};
use shadowbell_spec::status::Status;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::Arc;

/// Which descriptors stand for which doorbells.
///
/// A host whose doorbell values are in its shadow doorbell buffer rings only to wake a sleeper: the
/// value that it writes is of no use to anybody. So an eventfd does as well, and goes to the worker
/// without a message to whoever carries the controller, and without that one's thread.
///
/// Each controller has its own for each worker, because who holds an eventfd can also read it, and
/// so take the wakeups of others who would share it.
#[derive(Debug, Default)]
pub struct DoorbellEventfds {
    /// The descriptors; signal one to have doorbells looked at.
    pub events: Vec<EventFd>,
    /// Doorbells by their offset in BAR0, and the index of the descriptor that stands for each.
    pub doorbells: Vec<(u64, usize)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QueueState {
    Creating,
    Live,
    Deleting,
}

/// A submission queue that exists.
#[derive(Clone, Copy, Debug)]
struct SqRecord {
    layout: QueueLayout,
    cqid: u16,
    worker: usize,
    state: QueueState,
}

/// A completion queue that exists.
#[derive(Clone, Copy, Debug)]
struct CqRecord {
    layout: QueueLayout,
    vector: Option<u16>,
    worker: usize,
    state: QueueState,
}

impl SqRecord {
    /// Whether the host has been told that it exists, and not that it does not any more.
    fn exists(&self) -> bool {
        self.state != QueueState::Creating
    }
}

impl CqRecord {
    /// As [`SqRecord::exists`].
    fn exists(&self) -> bool {
        self.state != QueueState::Creating
    }
}

/// What creating a queue depends on beside the command.
pub(super) struct QueueEnvironment<'a> {
    pub(super) registers: &'a Registers,
    pub(super) memory: &'a HostMemory,
    /// Resets that there have been.
    pub(super) generation: u64,
}

impl QueueEnvironment<'_> {
    /// What a worker needs to know of the controller.
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

/// The I/O queues that exist.
pub(super) struct IoQueues {
    sqs: BTreeMap<u16, SqRecord>,
    cqs: BTreeMap<u16, CqRecord>,
    /// Submission and completion queues that the host may create (feature 07h).
    granted: (u16, u16),
    /// Workers that have had queues of this controller since the last reset.
    workers: BTreeSet<usize>,
    /// By worker, the descriptor that has it look at the doorbells.
    doorbell_eventfds: BTreeMap<usize, EventFd>,
}

impl IoQueues {
    /// None yet, and at most so many of each kind.
    pub(super) fn new(io_queues: u16) -> Self {
        Self {
            sqs: BTreeMap::new(),
            cqs: BTreeMap::new(),
            granted: (io_queues, io_queues),
            workers: BTreeSet::new(),
            doorbell_eventfds: BTreeMap::new(),
        }
    }

    /// The workers that serve these queues.
    pub(super) fn workers(&self) -> impl Iterator<Item = usize> {
        self.workers.iter().copied()
    }

    /// None of them has anything of the controller any more.
    pub(super) fn forget_workers(&mut self) {
        self.workers.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sqs.is_empty() && self.cqs.is_empty()
    }

    /// Whether there is any submission queue.
    pub(super) fn has_sqs(&self) -> bool {
        !self.sqs.is_empty()
    }

    /// Whether none is being created or deleted.
    pub(super) fn is_quiet(&self) -> bool {
        self.sqs.values().all(|sq| sq.state == QueueState::Live)
            && self.cqs.values().all(|cq| cq.state == QueueState::Live)
    }

    /// Submission and completion queues that the host may create.
    pub(super) fn granted(&self) -> (u16, u16) {
        self.granted
    }

    /// Where the completion queues are, and how many entries each has.
    pub(super) fn completion_queues(&self) -> impl Iterator<Item = (u64, u32)> {
        self.cqs.values().map(|cq| (cq.layout.iova, cq.layout.size.entries()))
    }

    /// Feature 07h, Number of Queues, was set.
    pub(super) fn grant(&mut self, submission: u16, completion: u16) {
        self.granted = (submission, completion);
    }

    /// The worker that serves submission queue `sqid`.
    pub(super) fn worker_of(&self, sqid: u16) -> Option<usize> {
        self.sqs.get(&sqid).map(|sq| sq.worker)
    }

    /// Has every namespace flushed, by a worker, whether there are queues or not: what was written
    /// through queues that are gone counts as well. The controller has to be enabled. The end of
    /// `operation` is its end.
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

    /// Has a piece of a namespace verified, by a worker, as with [`flush`](Self::flush).
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

    /// A reset begins: the doorbells stand for nothing any more.
    pub(super) fn drop_eventfds(&mut self) {
        self.doorbell_eventfds.clear();
    }

    /// A reset is over: all queues are gone.
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

    /// Descriptors that stand for the doorbells of the live queues.
    ///
    /// # Errors
    /// The system's, when it has no more descriptors.
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

    /// The descriptor that has `worker` look at this controller's doorbells.
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

/// The notice of an operation's end, as it is until a worker says otherwise.
pub(super) fn ended(generation: u64, operation: Operation) -> Notice {
    Notice::Ended { generation, operation, status: Status::SUCCESS }
}
