//! Queue move: the queues of one controller in transfer between two I/O threads.

use super::queue_set::QueueOverride;
use super::replay::{DEADLY, Inheritance, Replay, SuspectQueue};
use crate::exec::{Engine, NamespaceQueue, Quota};
use crate::interrupt::{HoldLimit, IrqLine};
use crate::journal::{RecoveredCommand, RecoveredJournal};
use crate::namespace::Namespaces;
use crate::notice::{ControlHandle, Latch};
use crate::queue::{Cq, QueueLayout, Sq};
use crate::saved::SavedPart;
use crate::shared::ControllerShared;
use crate::stats::{CqStats, PartCounters, SqStats};
use parking_lot::Mutex;
use shadowbell_memory::{DmaTable, EventFd, View};
use shadowbell_spec::regs::DoorbellKind;
use shadowbell_state::Descriptors;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Parameters for opening a controller's namespaces on an I/O thread.
#[derive(Clone)]
pub(crate) struct Opening {
    pub(crate) namespaces: Arc<Namespaces>,
    pub(crate) page_size: usize,
    pub(crate) max_transfer: usize,
    pub(crate) quota: Quota,
    /// Number of controller resets so far.
    pub(crate) generation: u64,
}

impl Opening {
    /// Takes the parameters. The namespaces are moved, the rest is copied.
    pub(super) fn take(&mut self) -> Self {
        Self { namespaces: std::mem::take(&mut self.namespaces), ..self.clone() }
    }

    /// Opens the namespaces on the calling I/O thread.
    pub(super) fn open(
        &self,
        table: Arc<DmaTable>,
        counters: Arc<PartCounters>,
    ) -> Result<Engine, std::io::Error> {
        let Self { namespaces, page_size, max_transfer, quota, .. } = self;
        let limits = (*page_size, *max_transfer, namespaces.guarantees.zeroes);
        let open = |nsid| NamespaceQueue::open_any(namespaces, nsid);
        let namespaces = (1..=namespaces.highest()).map(open).collect::<Result<_, _>>()?;
        Ok(Engine::new(View::new(table), limits, *quota, namespaces, counters))
    }
}

/// Pending move of a controller's queues to another I/O thread.
pub(crate) struct Departure {
    pub(crate) to: Destination,
    /// Latch that is released when the queues have arrived at the destination.
    pub(crate) latch: Latch,
}

/// Destination of a queue move: an I/O thread, or a [`Stopover`] on the way to one.
#[derive(Clone)]
pub(crate) struct Destination {
    /// Index of the thread in the pool.
    pub(crate) worker: usize,
    pub(crate) arrivals: Arc<dyn Arrivals>,
}

/// Receiver of moved queues.
pub(crate) trait Arrivals: Send + Sync {
    /// Delivers the queues.
    fn deliver(&self, queues: Box<Relocated>);
}

/// Queues of one controller that move between I/O threads. None of their commands is in flight.
pub(crate) struct Relocated {
    pub(super) shared: Arc<ControllerShared>,
    pub(super) control: ControlHandle,
    pub(super) opening: Opening,
    pub(super) table: Arc<DmaTable>,
    pub(super) counters: Arc<PartCounters>,
    pub(super) shadow: Option<(u64, u64)>,
    pub(super) sqs: Vec<Option<Sq>>,
    pub(super) cqs: Vec<Option<Cq>>,
    pub(super) overriding: Option<Box<dyn QueueOverride>>,
    pub(super) doorbell_eventfds: Vec<Arc<EventFd>>,
    pub(super) losses: u64,
    pub(super) lost_memory_reported: bool,
    /// Recovered commands that are executed again after the arrival.
    pub(super) inheritance: Inheritance,
    /// Latch to release when the queues have arrived. `None` if the queues were restored.
    pub(super) latch: Option<Latch>,
}

/// Parts of a controller that are needed to restore its queues.
pub(crate) struct Restoring<'a> {
    pub(crate) shared: &'a Arc<ControllerShared>,
    pub(crate) control: &'a ControlHandle,
    pub(crate) opening: Opening,
    pub(crate) table: &'a Arc<DmaTable>,
    /// Buffers of Doorbell Buffer Config.
    pub(crate) shadow: Option<(u64, u64)>,
    pub(crate) limit: HoldLimit,
}

impl Relocated {
    /// Number of the controller.
    pub(crate) fn id(&self) -> u32 {
        self.shared.id
    }

    /// Eventfds that signal doorbell writes.
    pub(crate) fn doorbell_eventfds(&self) -> &[Arc<EventFd>] {
        &self.doorbell_eventfds
    }

    /// Handle of the control plane.
    pub(crate) fn control(&self) -> &ControlHandle {
        &self.control
    }

    /// Serializes the queues. `worker` is the I/O thread that has served them.
    ///
    /// # Errors
    /// An OS error: no more descriptors.
    pub(crate) fn save(&self, worker: usize, fds: &mut Descriptors) -> io::Result<SavedPart> {
        let mut doorbell_eventfds = Vec::with_capacity(self.doorbell_eventfds.len());
        for event in &self.doorbell_eventfds {
            doorbell_eventfds.push(fds.add(event.as_fd().try_clone_to_owned()?));
        }
        let cqid = |sq: &Sq| self.cqs.get(sq.cq)?.as_ref().map(|cq| cq.layout.qid);
        let save = |sq: &Sq| cqid(sq).map(|cqid| sq.save(cqid));
        Ok(SavedPart {
            worker,
            sqs: self.sqs.iter().flatten().filter_map(save).collect(),
            cqs: self.cqs.iter().flatten().map(Cq::save).collect(),
            doorbell_eventfds,
        })
    }

    /// Adds the counters of the queues to the statistics.
    pub(crate) fn count(&self, sq: &mut SqStats, cq: &mut CqStats) {
        let traps = |qid, kind| self.shared.traps(qid, kind);
        for queue in self.sqs.iter().flatten() {
            sq.merge(&queue.counters.read(traps(queue.layout.qid, DoorbellKind::Sq)));
        }
        for queue in self.cqs.iter().flatten() {
            cq.merge(&queue.counters.read(traps(queue.layout.qid, DoorbellKind::Cq)));
        }
    }

    /// True if an override (fault injection) serves the queues.
    pub(crate) fn is_overridden(&self) -> bool {
        self.overriding.is_some()
    }

    /// Restores saved queues for `worker`; `None` if the saved state is invalid. The queues have no
    /// latch for their arrival, because its release could be mistaken for that of a later move.
    pub(crate) fn restore(
        saved: &SavedPart,
        doorbell_eventfds: Vec<EventFd>,
        with: &Restoring<'_>,
        worker: usize,
    ) -> io::Result<Option<Self>> {
        let Some(queues) = Self::restore_queues(saved, doorbell_eventfds, with) else {
            return Ok(None);
        };
        // The queue positions are written to the journal here and not by the I/O thread, because
        // this process may crash before the thread has received the queues.
        if let Some(part) = with.shared.journal_part(worker, with.opening.generation)? {
            queues.sqs.iter().flatten().for_each(|sq| sq.write_down(&part, 0));
            queues.cqs.iter().flatten().for_each(|cq| cq.write_down(&part));
        }
        Ok(Some(queues))
    }

    fn restore_queues(
        saved: &SavedPart,
        doorbell_eventfds: Vec<EventFd>,
        with: &Restoring<'_>,
    ) -> Option<Self> {
        let Restoring { shared, table, shadow, limit, .. } = *with;
        let mut cqs = Vec::with_capacity(saved.cqs.len());
        for saved in &saved.cqs {
            let irq = saved.vector.map(|vector| IrqLine::new(Arc::clone(&shared.irqs), vector));
            let mut cq = Cq::restore(saved, shared, irq, limit)?;
            cq.remap(table, shadow);
            cqs.push(Some(cq));
        }
        let mut sqs = Vec::with_capacity(saved.sqs.len());
        for saved_sq in &saved.sqs {
            let cq = saved.cqs.iter().position(|cq| cq.qid == saved_sq.cqid)?;
            let mut sq = Sq::restore(saved_sq, shared, cq)?;
            sq.remap(table, shadow);
            sqs.push(Some(sq));
        }
        Some(Self::without_commands(with, saved.worker, sqs, cqs, doorbell_eventfds))
    }

    /// Creates queues without commands in flight, which `worker` will serve.
    fn without_commands(
        with: &Restoring<'_>,
        worker: usize,
        sqs: Vec<Option<Sq>>,
        cqs: Vec<Option<Cq>>,
        doorbell_eventfds: Vec<EventFd>,
    ) -> Self {
        let counters = with.shared.count_part(worker);
        let doorbell_eventfds: Vec<_> = doorbell_eventfds.into_iter().map(Arc::new).collect();
        for event in &doorbell_eventfds {
            counters.add_doorbell_eventfd(Arc::clone(event));
        }
        Self {
            shared: Arc::clone(with.shared),
            control: with.control.clone(),
            opening: with.opening.clone(),
            table: Arc::clone(with.table),
            counters,
            shadow: with.shadow,
            sqs,
            cqs,
            overriding: None,
            doorbell_eventfds,
            losses: 0,
            lost_memory_reported: false,
            inheritance: Inheritance::default(),
            latch: None,
        }
    }

    /// Restores the queues of a dead process for the I/O thread `worker`, with the positions in the
    /// `journal` of that process. `None` if the saved state is invalid. `others` is the number of
    /// recovered commands of other queues that `worker` has to execute again.
    pub(crate) fn recover(
        saved: &SavedPart,
        doorbell_eventfds: Vec<EventFd>,
        with: &Restoring<'_>,
        journal: &mut RecoveredJournal,
        (worker, others): (usize, usize),
    ) -> Result<Option<Self>, io::Error> {
        let Restoring { shared, table, shadow, limit, .. } = *with;
        let size_of = |sqid: u16| {
            let sq = saved.sqs.iter().find(|sq| sq.qid == sqid)?;
            QueueLayout::restore(sq.qid, sq.iova, sq.entries).map(|layout| layout.size)
        };
        let mut positions: BTreeMap<u16, _> =
            saved.sqs.iter().map(|sq| (sq.qid, journal.sq(sq.qid))).collect();
        let mut cqs = Vec::with_capacity(saved.cqs.len());
        for saved in &saved.cqs {
            let irq = saved.vector.map(|vector| IrqLine::new(Arc::clone(&shared.irqs), vector));
            let state = journal.cq(saved.qid);
            let cq = Cq::recover(saved, shared, (irq, limit), state, table, |cqe, nth| {
                if let Some((position, _)) = positions.get_mut(&cqe.sq_id)
                    && let Some(size) = size_of(cqe.sq_id)
                {
                    journal.posted(&cqe, nth, size, position);
                }
            });
            let Some(mut cq) = cq else { return Ok(None) };
            cq.remap(table, shadow);
            cqs.push(Some(cq));
        }
        let part = shared.journal_part(worker, with.opening.generation)?;
        let mut sqs = Vec::with_capacity(saved.sqs.len());
        let (mut replays, mut suspects, mut records) = (Vec::new(), Vec::new(), 0);
        for (index, saved_sq) in saved.sqs.iter().enumerate() {
            let cq = saved.cqs.iter().position(|cq| cq.qid == saved_sq.cqid);
            let (Some(cq), Some(state)) = (cq, positions.get(&saved_sq.qid)) else {
                return Ok(None);
            };
            let Some(mut sq) = Sq::recover(saved_sq, shared, cq, *state) else {
                return Ok(None);
            };
            sq.remap(table, shadow);
            let mut commands = journal.take(saved_sq.qid, state.0);
            let mut crashes = journal.crashes_with(saved_sq.qid, sq.fetched);
            if crashes >= DEADLY {
                // Too many processes have crashed while they started the next command, so it is
                // completed with an error. It is fetched here as a recovered command, because a
                // normal fetch would execute it.
                let (sqid, count) = (saved_sq.qid, sq.fetched);
                let fetched = sq.fetch();
                let decision = None;
                commands.extend(fetched.map(|sqe| RecoveredCommand {
                    sqid,
                    count,
                    crashes,
                    sqe,
                    decision,
                }));
                crashes = 0;
            }
            let is_of_a_fault = journal.is_of_a_fault();
            if is_of_a_fault || crashes != 0 {
                let begin = sq.fetched;
                suspects.push(SuspectQueue { sq: index, begin, crashes, is_of_a_fault });
            }
            sqs.push(Some(sq));
            let before = replays.len();
            for command in commands {
                // The journal records of all recovered commands of an I/O thread are in one table,
                // so the commands are numbered across its queues.
                let nth = others + records;
                records += 1;
                let reserved_slot =
                    part.as_ref().map_or(0, |part| part.record_recovered_at(nth, &command));
                Replay::add(&mut replays, before, Replay::new(index, command, reserved_slot));
            }
            replays.iter().skip(before).for_each(Replay::isolate_suspects);
        }
        if let Some(part) = &part {
            // The counts of posted completions start at 0, because they count only those of this
            // process.
            sqs.iter().flatten().for_each(|sq: &Sq| sq.write_down(part, 0));
            cqs.iter().flatten().for_each(|cq: &Cq| cq.write_down(part));
            for suspect in suspects.iter().filter(|suspect: &&SuspectQueue| suspect.crashes != 0) {
                if let Some(sq) = saved.sqs.get(suspect.sq) {
                    part.store_suspect(sq.qid, suspect.begin, suspect.crashes);
                }
            }
        }
        if replays.iter().any(Replay::needs_exclusive) {
            shared.set_exclusive(true);
        }
        let new = Self::without_commands(with, worker, sqs, cqs, doorbell_eventfds);
        Ok(Some(Self { inheritance: Inheritance { replays, suspects }, ..new }))
    }

    /// Number of commands to execute again.
    pub(crate) fn replays(&self) -> usize {
        self.inheritance.replays.iter().map(|replay| 1 + usize::from(replay.second.is_some())).sum()
    }
}

/// Holder of the queues of a quiesced controller, until they return to their I/O thread or are
/// serialized for another process.
pub(crate) struct Stopover {
    home: Destination,
    queues: Mutex<Option<Box<Relocated>>>,
}

impl Stopover {
    /// Creates an empty stopover for queues that are served by `home` now.
    pub(crate) fn new(home: Destination) -> Arc<Self> {
        Arc::new(Self { home, queues: Mutex::default() })
    }

    /// Creates a stopover with restored queues, which will be sent to `home`.
    pub(crate) fn with_queues(home: Destination, queues: Relocated) -> Arc<Self> {
        Arc::new(Self { home, queues: Mutex::new(Some(Box::new(queues))) })
    }

    /// Destination for queues that move into this stopover. The thread index remains that of
    /// `home`.
    pub(crate) fn destination(self: &Arc<Self>) -> Destination {
        let arrivals: Arc<dyn Arrivals> = Arc::<Self>::clone(self);
        Destination { worker: self.home.worker, arrivals }
    }

    /// Index of the I/O thread to which the queues return.
    pub(crate) fn worker(&self) -> usize {
        self.home.worker
    }

    /// Calls `look` with the queues, if there are any.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&Relocated) -> T) -> Option<T> {
        self.queues.lock().as_deref().map(look)
    }

    /// Drops the queues and adds their counters to the controller's statistics.
    pub(crate) fn drop_queues(&self) {
        let queues = self.queues.lock().take();
        let Some(queues) = queues else { return };
        let Relocated { shared, counters, sqs, cqs, .. } = *queues;
        sqs.iter().flatten().for_each(|sq| shared.retire_sq(&sq.counters));
        cqs.iter().flatten().for_each(|cq| shared.retire_cq(&cq.counters));
        shared.retire_part(&counters);
    }

    /// Returns the queues to their I/O thread.
    pub(crate) fn send_back(&self) {
        let queues = self.queues.lock().take();
        if let Some(queues) = queues {
            self.home.arrivals.deliver(queues);
        }
    }
}

impl Arrivals for Stopover {
    fn deliver(&self, mut queues: Box<Relocated>) {
        let latch = queues.latch.take();
        *self.queues.lock() = Some(queues);
        drop(latch);
    }
}
