//! Admin queue pair.

use super::cq::MEMORY_LOST_STATUS;
use super::{Cq, Permit, QueueLayout, ShadowCells, Sq};
use crate::interrupt::{HoldLimit, IrqLine};
use crate::journal::{JournalPart, Position, RecoveredJournal};
use crate::saved::SavedAdminQueue;
use crate::shared::{ControllerShared, DSTRD};
use shadowbell_doorbell::{InvalidDoorbell, RingSize, Sleeper};
use shadowbell_memory::{DmaTable, Fault};
use shadowbell_spec::dbbuf::{cq_entry_offset, sq_entry_offset};
use shadowbell_spec::regs::{Aqa, DoorbellKind};
use shadowbell_spec::status::Status;
use shadowbell_spec::{Cqe, Sqe};
use shadowbell_state::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use zerocopy::{FromBytes, transmute};

/// Completion of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AdminCompletion {
    pub(crate) cid: u16,
    pub(crate) status: Status,
    pub(crate) dw0: u32,
    /// True if an entry of the completion queue is reserved for this completion.
    pub(crate) placed: bool,
}

/// Admin queue pair. No thread polls it: whenever the control thread finds no command, it arms the
/// doorbells, so that the next write traps.
pub(crate) struct AdminQueue {
    sq: Sq,
    cq: Cq,
    /// Completion queue entries reserved for commands in flight.
    permits: Vec<Permit>,
    /// Commands that were in flight in a dead process. They are executed again, before other
    /// commands.
    replays: VecDeque<Sqe>,
    /// Command identifier and status of each staged completion.
    staged: VecDeque<(u16, Status)>,
    /// True if the completion queue has never been in memory that the host shares.
    acq_missing: bool,
    /// Sleeper for the arming protocol (publish, fence, recheck). No thread sleeps on it.
    sleeper: Sleeper<Arc<AtomicU32>>,
}

impl AdminQueue {
    /// Creates the queues at `asq` and `acq`, with the sizes in `aqa`, which are at least 2.
    pub(crate) fn new(
        shared: &ControllerShared,
        table: &DmaTable,
        aqa: Aqa,
        asq: u64,
        acq: u64,
    ) -> Result<Self, Fault> {
        let size = |zero_based: u16| {
            RingSize::from_zero_based(zero_based).unwrap_or(RingSize::new(2).expect("2 is a size"))
        };
        let sq = QueueLayout { qid: 0, iova: asq, size: size(aqa.asqs()) };
        let cq = QueueLayout { qid: 0, iova: acq, size: size(aqa.acqs()) };
        let irq = IrqLine::new(Arc::clone(&shared.irqs), 0);
        let mut sq = Sq::new(sq, shared, 0);
        let mut cq = Cq::new(cq, shared, Some(irq), HoldLimit::NONE);
        sq.resolve(table)?;
        let acq_missing = cq.resolve(table).is_err();
        let sleeper = Sleeper::new(Arc::default());
        let (replays, staged) = (VecDeque::new(), VecDeque::new());
        Ok(Self { sq, cq, permits: Vec::new(), replays, staged, acq_missing, sleeper })
    }

    /// Serializes the queues while no command is in flight.
    pub(crate) fn save(&self, used: bool) -> SavedAdminQueue {
        let (sq, cq) = (self.sq.save(0), self.cq.save());
        SavedAdminQueue { sq, cq, used, lacks_cq: self.acq_missing, in_flight: Vec::new() }
    }

    /// Writes the queues' positions to the journal, for crash recovery.
    pub(crate) fn write_down(&self, journal: &JournalPart) {
        self.sq.write_down(journal, self.cq.posted());
        self.cq.write_down(journal);
    }

    /// Restores the queues of a dead process from its saved state and its `journal`; `None` if the
    /// saved state is invalid.
    pub(crate) fn recover(
        saved: &SavedAdminQueue,
        shared: &ControllerShared,
        table: &DmaTable,
        pages: Option<(u64, u64)>,
        journal: &RecoveredJournal,
    ) -> Option<Self> {
        let position = |at, phase, truth| Position { at, phase, count: u64::from(at), truth };
        let (known, doorbell) = journal.sq(0);
        let state = (position(saved.sq.head, false, known.truth), doorbell);
        let sq = Sq::recover(&saved.sq, shared, 0, state)?;
        let (known, doorbell) = journal.cq(0);
        let state = (position(saved.cq.tail, saved.cq.phase, known.truth), doorbell);
        let irq = Some(IrqLine::new(Arc::clone(&shared.irqs), 0));
        let mut ended: Vec<Cqe> =
            saved.cq.staged.iter().map(|&(low, high)| transmute!([low, high])).collect();
        let cq =
            Cq::recover(&saved.cq, shared, (irq, HoldLimit::NONE), state, table, |posted, _| {
                let known = ended.iter().position(|cqe| cqe.cid == posted.cid);
                if let Some(known) = known {
                    ended.remove(known);
                }
            })?;
        let entry = |bytes: &Bytes| Sqe::read_from_bytes(&bytes.0).ok();
        let replays = saved.in_flight.iter().map(entry).collect::<Option<_>>()?;
        let mut queue = Self {
            sq,
            cq,
            permits: Vec::new(),
            replays,
            staged: VecDeque::new(),
            acq_missing: saved.lacks_cq,
            sleeper: Sleeper::new(Arc::default()),
        };
        queue.remap(table, pages);
        for cqe in ended {
            queue.staged.push_back((cqe.cid, cqe.status()));
            queue.cq.complete_unreserved(cqe);
        }
        Some(queue)
    }

    /// Restores saved queues; `None` if the state is invalid. `pages` are the buffers of Doorbell
    /// Buffer Config.
    pub(crate) fn restore(
        saved: &SavedAdminQueue,
        shared: &ControllerShared,
        table: &DmaTable,
        pages: Option<(u64, u64)>,
    ) -> Option<Self> {
        let irq = Some(IrqLine::new(Arc::clone(&shared.irqs), 0));
        let sq = Sq::restore(&saved.sq, shared, 0)?;
        let cq = Cq::restore(&saved.cq, shared, irq, HoldLimit::NONE)?;
        let sleeper = Sleeper::new(Arc::default());
        let acq_missing = saved.lacks_cq;
        let replays = VecDeque::new();
        // The upper 8 bytes of a completion contain the command identifier in bits 47:32, the phase
        // tag in bit 48, and the status above.
        let command = |high: u64| ((high >> 32) as u16, Status::from_bits((high >> 49) as u16));
        let staged = saved.cq.staged.iter().map(|&(_, high)| command(high)).collect();
        let mut queue = Self { sq, cq, permits: Vec::new(), replays, staged, acq_missing, sleeper };
        queue.remap(table, pages);
        Some(queue)
    }

    /// Position of the completion queue, and the identifiers of completions that are not posted
    /// yet.
    pub(crate) fn to_post(&self) -> ((u16, bool), impl Iterator<Item = u16>) {
        ((self.cq.tail, self.cq.phase), self.staged.iter().map(|(cid, _)| *cid))
    }

    /// True if no command is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.permits.is_empty() && self.replays.is_empty()
    }

    /// Moves the completion queue to `acq`. Only valid before the first command is executed.
    pub(crate) fn set_cq_address(&mut self, table: &DmaTable, acq: u64) {
        self.cq.layout.iova = acq;
        self.acq_missing = self.cq.resolve(table).is_err();
    }

    /// True if a command is waiting but the memory of the completion queue is missing.
    pub(crate) fn lacks_cq(&self) -> bool {
        self.acq_missing && self.sq.tail.peek() != self.sq.head
    }

    /// Applies Doorbell Buffer Config. Fails if a doorbell value in the old pages is invalid.
    pub(crate) fn change_shadow(
        &mut self,
        table: &DmaTable,
        pages: Option<(u64, u64)>,
    ) -> Result<(), InvalidDoorbell> {
        let cells = |offset| ShadowCells::resolve(table, pages?, offset);
        let tail = self.sq.shadow(cells(sq_entry_offset(0, DSTRD)));
        let head = self.cq.shadow(cells(cq_entry_offset(0, DSTRD)));
        tail.and(head)
    }

    /// Resolves the queues and their doorbells in another DMA map.
    pub(crate) fn remap(&mut self, table: &DmaTable, pages: Option<(u64, u64)>) {
        self.sq.remap(table, pages);
        self.cq.remap(table, pages);
        self.acq_missing &= self.cq.ring.is_none();
    }

    /// Fetches the next command and reserves an entry for its completion, if there is room.
    pub(crate) fn next(&mut self) -> Result<Option<Sqe>, InvalidDoorbell> {
        // Commands in `replays` were fetched by the dead process, so the tail does not matter for
        // them.
        if self.replays.is_empty()
            && (self.sq.ring.is_none() || self.sq.poll_tail()? == self.sq.head)
        {
            self.sq.blocked = false;
            return Ok(None);
        }
        if self.cq.ring.is_none() {
            return Ok(None);
        }
        if self.cq.free() == 0 {
            self.cq.poll_head();
            if let Some(error) = self.cq.take_invalid() {
                return Err(error);
            }
        }
        self.sq.blocked = self.cq.free() == 0;
        if self.sq.blocked {
            return Ok(None);
        }
        self.sq.counters.batches.add(1);
        let sqe = self.replays.pop_front().or_else(|| self.sq.fetch());
        if sqe.is_some() {
            self.permits.push(self.cq.reserve(1).take());
        }
        Ok(sqe)
    }

    /// Releases the reserved completion entry of the last fetched command, for commands that may
    /// stay in flight forever, such as Asynchronous Event Requests.
    pub(crate) fn release_last_permit(&mut self) {
        if let Some(place) = self.permits.pop() {
            self.cq.release(place);
        }
    }

    pub(crate) fn complete(&mut self, completion: &AdminCompletion) {
        let &AdminCompletion { cid, status, dw0, placed } = completion;
        let cqe = Cqe::new(cid, 0, self.sq.head, status, dw0);
        self.staged.push_back((cid, status));
        match self.permits.pop_if(|_| placed) {
            Some(place) => self.cq.complete(place, cqe),
            None => self.cq.complete_unreserved(cqe),
        }
    }

    /// Posts staged completions as far as there is room, and raises the interrupt. If any were
    /// posted, calls `posted` before the interrupt, with the position of the completion queue and
    /// the posted commands. `table` is the DMA map of the commands.
    pub(crate) fn post(
        &mut self,
        shared: &ControllerShared,
        table: &DmaTable,
        posted: impl FnOnce((u16, bool), Vec<(u16, Status)>),
    ) {
        let before = self.cq.posted();
        if self.cq.has_staged() {
            self.cq.check_memory(|| table);
        }
        if self.cq.has_lost_memory() {
            let succeeded = self.staged.iter_mut().filter(|(_, status)| status.is_success());
            succeeded.for_each(|(_, status)| *status = MEMORY_LOST_STATUS);
        }
        if self.cq.post() {
            let count = (self.cq.posted() - before) as usize;
            let count = count.min(self.staged.len());
            posted((self.cq.tail, self.cq.phase), self.staged.drain(..count).collect());
            self.cq.notify_host(&shared.coalescing);
        }
        // The interrupt is raised at once, because no later poll would raise a held interrupt.
        self.cq.flush_interrupts();
    }

    /// True if memory of the host was lost, so that its commands fail until the next reset.
    pub(crate) fn has_lost_memory(&self) -> bool {
        self.cq.has_lost_memory()
    }

    /// Arms the doorbells and rechecks them. Returns true if there is no work.
    pub(crate) fn arm(&mut self) -> Result<bool, InvalidDoorbell> {
        let Self { sq, cq, sleeper, .. } = self;
        let wait_for_room = sq.blocked || cq.has_staged();
        let mut arming = sleeper.prepare();
        sq.tail.arm(&mut arming);
        if wait_for_room {
            cq.head.arm(&mut arming);
        }
        let mut fenced = arming.fence();
        let tail = sq.recheck_tail(&mut fenced);
        let head = if wait_for_room { cq.head.recheck(&mut fenced, cq.tail) } else { Ok(0) };
        if !wait_for_room {
            cq.poll_head();
        }
        let idle = fenced.try_sleep().is_some();
        tail?;
        head?;
        cq.take_invalid().map_or(Ok(idle), Err)
    }

    /// Ends the queues. The counters of their doorbell writes are cleared, so that later queues
    /// start at 0.
    pub(crate) fn retire(self, shared: &ControllerShared) {
        shared.drop_heads(0);
        shared.take_traps(0, DoorbellKind::Sq);
        shared.take_traps(0, DoorbellKind::Cq);
    }
}
