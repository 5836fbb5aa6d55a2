//! Queues of one controller on one I/O thread: creation and deletion, remapping of queue memory,
//! and moves between I/O threads.

use super::mailbox::{QueueContext, Unread};
use super::observer::Observer;
use super::queue_move::{Departure, Opening, Relocated};
use super::queue_set::{QueueOverride, QueueSet, SleepCell};
use super::recovery::Recovery;
use super::replay::Inheritance;
use crate::admin::self_test::Piece;
use crate::exec::{Closed, Exceeded, NamespaceQueue};
use crate::interrupt::{HoldLimit, IrqLine};
use crate::namespace::Namespaces;
use crate::notice::{Latch, Notice};
use crate::outstanding::Outstanding;
use crate::queue::{Cq, QueueLayout, ShadowCells, Sq};
use crate::shared::{ControllerShared, DSTRD};
use crate::trace::COMPLETION_QUEUE;
use shadowbell_doorbell::{Arming, Fenced, Sleeper};
use shadowbell_memory::page_tables::{self, Check};
use shadowbell_memory::{DmaTable, EventFd, View, ViewWatch};
use shadowbell_spec::dbbuf::{cq_entry_offset, sq_entry_offset};
use shadowbell_spec::status::Status;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Object of a pending deletion or wait. The operation ends when nothing that belongs to the object
/// is in flight any more.
pub(super) enum Deleting {
    /// Submission queue of this index.
    Sq(usize),
    /// Replaced or removed disk queue with this index in the engine, and the epoll instance that
    /// watches it.
    Disk(usize, Arc<OwnedFd>),
    /// Everything in flight except commands that wait for exclusive execution.
    AllButExclusive,
    /// All queues.
    Everything,
}

/// Queues of one controller on one I/O thread.
pub(crate) struct ControllerQueues {
    pub(super) set: QueueSet,
    pub(super) overriding: Option<Box<dyn QueueOverride>>,
    pub(super) shadow: Option<(u64, u64)>,
    /// Eventfds that signal doorbell writes of this controller.
    pub(super) doorbell_eventfds: Vec<Arc<EventFd>>,
    /// Old DMA maps that in-flight commands may still use, with the latches that wait for the end
    /// of this use. The maps are released in the order of their replacement, because two of them
    /// may contain the same memory.
    pub(super) draining: VecDeque<(ViewWatch, Vec<Latch>)>,
    /// Pending deletions, with the latches that wait for them.
    deleting: Vec<(Deleting, Latch)>,
    detaching: Vec<Latch>,
    /// `memory::sigbus::losses` at the last check. Initially 0 and not the current value, so that
    /// the first check also finds memory that was lost before.
    pub(super) losses: u64,
    /// True if lost memory in the current map was reported.
    pub(super) lost_memory_reported: bool,
    /// Index of the submission queue with which the next pass begins: the one after the queue that
    /// used up the budget of the last pass.
    pub(super) first: usize,
    /// Parameters for opening the namespaces on another I/O thread.
    pub(super) opening: Opening,
    /// Pending move to another I/O thread, which happens once nothing is in flight.
    pub(super) departure: Option<Departure>,
    /// Pending check of the size of the page tables, requested after many sparse accesses to guest
    /// memory. Until the check ends, no commands are fetched.
    pub(super) page_table_check: Option<Check>,
    /// Commands that are recovered from a dead process.
    pub(super) recovery: Option<Box<Recovery>>,
}

impl ControllerQueues {
    /// Opens the namespaces on the calling I/O thread, which has the index `worker`.
    pub(crate) fn new(context: QueueContext, worker: usize) -> Result<Self, std::io::Error> {
        let QueueContext { shared, control, table, namespaces, .. } = context;
        let QueueContext { page_size, max_transfer, quota, generation, .. } = context;
        let opening = Opening { namespaces, page_size, max_transfer, quota, generation };
        let counters = shared.count_part(worker);
        let engine = opening.open(table, counters)?;
        let journal = shared.journal_part(worker, generation)?;
        Ok(Self {
            set: QueueSet::new(shared, control, engine, journal),
            recovery: None,
            overriding: context.overriding,
            shadow: context.shadow,
            opening,
            departure: None,
            page_table_check: None,
            doorbell_eventfds: Vec::new(),
            draining: VecDeque::new(),
            deleting: Vec::new(),
            detaching: Vec::new(),
            losses: 0,
            lost_memory_reported: false,
            first: 0,
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.set.shared.id
    }

    /// Publishes in the statistics if the thread skips this controller in its passes.
    pub(super) fn set_skipped(&self, skipped: bool) {
        self.set.engine.counters.set_skipped(skipped);
    }

    pub(crate) fn shared(&self) -> &Arc<ControllerShared> {
        &self.set.shared
    }

    pub(crate) fn namespaces(&self) -> &[NamespaceQueue] {
        self.set.engine.namespaces()
    }

    /// Removes the file descriptors that the disks signal to wake the thread.
    pub(crate) fn unwatch_disks(&self, epoll: &OwnedFd) {
        self.set.engine.queues().for_each(|queue| queue.unwatch(epoll));
    }

    /// Applies the entry for `nsid` of `namespaces` to all following commands: a changed namespace,
    /// or its removal. If the disk cannot be opened, nothing changes, and the latch gets an error
    /// status.
    pub(crate) fn change_namespace(
        &mut self,
        nsid: u32,
        namespaces: &Arc<Namespaces>,
        latch: Latch,
        epoll: &Arc<OwnedFd>,
    ) {
        if self.is_detaching() {
            return self.deleting.push((Deleting::Everything, latch));
        }
        let opened = namespaces.get(nsid).map(|namespace| {
            let queue = NamespaceQueue::open(namespace)?;
            queue.watch(epoll).map(|()| queue)
        });
        match opened.transpose() {
            Ok(new) => {
                self.opening.namespaces = Arc::clone(namespaces);
                let absence = namespaces.absence(nsid);
                let place = self.set.engine.change_namespace(nsid as usize - 1, new, absence);
                let disk = |place| (Deleting::Disk(place, Arc::clone(epoll)), latch);
                self.deleting.extend(place.map(disk));
            }
            Err(error) => {
                tracing::error!(nsid, %error, "cannot open the disk of a namespace");
                latch.set_status(Status::INTERNAL);
            }
        }
    }

    /// Sets an override: an object that serves the queues instead of the normal code.
    pub(crate) fn set_override(&mut self, overriding: Box<dyn QueueOverride>) {
        // An existing override is not replaced, because it holds delayed commands. It reads new
        // faults itself.
        self.overriding.get_or_insert(overriding);
    }

    /// Stores a doorbell eventfd that the thread waits for, so that it stays open as long as the
    /// queues exist.
    pub(crate) fn add_eventfd(&mut self, event: EventFd) {
        let event = Arc::new(event);
        self.set.engine.counters.add_doorbell_eventfd(Arc::clone(&event));
        self.doorbell_eventfds.push(event);
    }

    pub(crate) fn doorbell_eventfds(&self) -> &[Arc<EventFd>] {
        &self.doorbell_eventfds
    }

    pub(super) fn table(&self) -> Arc<DmaTable> {
        Arc::clone(self.set.engine.view().table())
    }

    pub(crate) fn flush(&mut self, latch: Latch) {
        self.set.engine.flush_all(latch);
    }

    /// Verifies a range of a namespace, for a device self-test.
    pub(crate) fn verify(&mut self, piece: Piece, latch: Latch) {
        if !self.is_detaching() {
            self.set.engine.verify(piece, latch);
        }
    }

    /// Stops fetching for an exclusive command. The latch is released when all commands in flight
    /// are parked for exclusive execution.
    pub(crate) fn pause(&mut self, latch: Latch) {
        self.set.engine.pause();
        self.deleting.push((Deleting::AllButExclusive, latch));
    }

    /// Grants exclusive execution to the parked commands of this thread.
    pub(crate) fn grant_exclusive(&mut self, latch: Latch) {
        self.set.engine.grant_exclusive(latch);
    }

    /// Writes the outcomes of exclusive commands to the journal, after the control plane has
    /// recorded the blocks that they mark.
    pub(crate) fn journal_decisions(&mut self, latch: Latch) {
        self.set.engine.journal_decisions(latch);
    }

    /// Ends exclusive execution: fetching continues.
    pub(crate) fn end_exclusive(&mut self) {
        self.set.engine.end_exclusive();
    }

    /// Applies a change of the controller's access to a namespace.
    pub(crate) fn review_access(&mut self, uuid: &[u8; 16], aborts: bool, latch: &Latch) {
        self.set.engine.review_access(uuid, aborts, latch);
    }

    /// Ends a reservation command.
    pub(crate) fn reservation_ended(&mut self, ticket: u64, status: Status) {
        self.set.engine.reservation_ended(ticket, status);
    }

    pub(crate) fn abort(&mut self, sqid: u16, cid: u16, latch: Latch) {
        let Some(index) = self.set.find_sq(sqid) else { return };
        if let Some(overriding) = &mut self.overriding
            && overriding.abort(&mut self.set, index, cid)
        {
            return latch.set_status(Status::ABORT_REQUESTED);
        }
        self.set.engine.abort(index, cid, latch);
    }

    pub(crate) fn detach(&mut self, latch: Latch) {
        // Shadow pages are dropped first: after a reset, the guest may reuse their memory.
        self.shadow = None;
        for sq in self.set.sqs.iter_mut().flatten() {
            sq.tail.disable();
            sq.stopped = true;
        }
        for cq in self.set.cqs.iter_mut().flatten() {
            cq.head.disable();
            cq.ring = None;
        }
        self.set.engine.cancel_all(None);
        if let Some(overriding) = &mut self.overriding {
            overriding.reset();
        }
        self.recovery = None;
        self.detaching.push(latch);
    }

    /// True if an interrupt is held by moderation, so briefly that a sleep is not worthwhile.
    pub(crate) fn is_about_to_notify(&self) -> bool {
        self.set.cqs.iter().flatten().any(Cq::is_about_to_notify)
    }

    /// True if requests are in flight.
    pub(crate) fn is_pending(&self) -> bool {
        self.set.engine.pending() != 0
    }

    /// Logs the disks that have not answered all requests.
    pub(crate) fn log_pending(&self) {
        for (nsid, queue) in (1..).zip(self.namespaces()) {
            let pending = queue.pending();
            if pending != 0
                && let Some(namespace) = self.opening.namespaces.get(nsid)
            {
                let disk = namespace.disk().name();
                tracing::warn!(nsid, "{disk}: {pending} requests have not been answered");
            }
        }
    }

    /// Outstanding commands on this thread.
    pub(crate) fn outstanding(&self) -> Outstanding {
        let QueueSet { engine, sqs, .. } = &self.set;
        let mut sum = Outstanding { controller: self.id(), ..Outstanding::default() };
        for sq in sqs.iter().flatten().filter(|sq| !sq.stopped) {
            let queued = sq.layout.size.distance(sq.head, sq.tail.peek());
            sum.queued += queued;
            if sq.blocked || engine.is_full() {
                sum.held_back += queued;
            }
            sum.in_flight += sq.in_flight;
            sum.capacity += sq.layout.size.entries() - 1;
        }
        let requests = (1..).zip(self.namespaces());
        let requests = requests.map(|(nsid, queue)| (nsid, queue.pending() as u64));
        sum.requests = requests.filter(|(_, count)| *count != 0).collect();
        sum
    }

    /// Number of requests that have ended so far.
    pub(crate) fn ended(&self) -> u64 {
        self.set.engine.ended()
    }

    /// True if the queues are being detached.
    pub(crate) fn is_detaching(&self) -> bool {
        !self.detaching.is_empty()
    }

    /// Adds a latch to a detach in progress.
    pub(crate) fn detach_again(&mut self, latch: Latch) {
        self.detaching.push(latch);
    }

    /// True if the queues can be removed from this thread: nothing is in flight, and either a
    /// detach or a move to another thread is pending.
    #[inline]
    pub(crate) fn can_be_removed(&self) -> bool {
        (self.is_detaching() || self.departure.is_some() && !self.is_waited_for())
            && !self.is_pending()
            && !self.has_replays()
    }

    /// True if a latch on this thread waits for the end of an operation.
    fn is_waited_for(&self) -> bool {
        !(self.draining.is_empty() && self.deleting.is_empty()) || self.override_is_waiting()
    }

    /// Reports to the control plane that this controller's turns delay other controllers of the
    /// thread.
    #[cold]
    pub(crate) fn report_slow(&self, took: Duration) {
        self.set.control.notify(Notice::SlowTurns { took });
    }

    /// Adds the queues' counters to the controller's, before the queues are dropped.
    pub(crate) fn retire(&mut self) {
        let QueueSet { shared, sqs, cqs, engine, .. } = &mut self.set;
        sqs.iter_mut().filter_map(Option::take).for_each(|sq| shared.retire_sq(&sq.counters));
        cqs.iter_mut().filter_map(Option::take).for_each(|cq| shared.retire_cq(&cq.counters));
        shared.retire_part(&engine.counters);
    }

    /// Makes one pass: reaps the disks, fetches and starts commands, posts completions, raises
    /// interrupts. Commands are started until `budget`, in nanoseconds, is used up. Returns the
    /// amount of work, in commands.
    // Inlined into the thread's loop, which makes nearly all passes.
    #[inline(always)]
    pub(crate) fn pass(
        &mut self,
        budget: i64,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        let mut work = 0;
        self.set.engine.set_budget(budget);
        if self.set.engine.is_sparse() || self.page_table_check.is_some() {
            self.bound_page_tables();
        }
        if self.set.engine.pending() != 0 {
            work += u32::from(match &mut self.overriding {
                None => self.set.reap(),
                Some(overriding) => {
                    let busy = overriding.reap(&mut self.set);
                    self.set.write_decisions();
                    busy
                }
            });
        }
        if let Some(overriding) = &mut self.overriding
            && overriding.is_waiting()
        {
            overriding.tick(&mut self.set);
        }
        if self.recovery.is_some() {
            work += self.advance_recovery(unread, trace);
        }
        let first = self.first;
        if first != 0 {
            work += self.serve_from(first, unread, trace);
        }
        let end = if first == 0 { self.set.sqs.len() } else { first };
        for index in 0..end {
            work += self.serve(index, unread, trace);
        }
        self.set.engine.commit();
        self.set.post(trace);
        if !(self.draining.is_empty() && self.deleting.is_empty()) {
            self.finish();
        }
        work
    }

    /// Starts a trace.
    pub(crate) fn begin_trace(&mut self) {
        self.set.begin_trace();
    }

    /// Stops fetching if this controller's sparse accesses to guest memory may have created too
    /// many page tables, until a check of their size has ended.
    #[cold]
    #[inline(never)]
    fn bound_page_tables(&mut self) {
        if let Some(page_table_check) = self.page_table_check {
            if !page_table_check.is_over() {
                return;
            }
            self.page_table_check = None;
            self.set.engine.open(Closed::PageTables);
        } else if self.set.engine.has_spent() {
            self.set.engine.may_touch_more();
            self.page_table_check = page_tables::request_check();
            if self.page_table_check.is_some() {
                self.set.engine.close(Closed::PageTables);
            }
        }
    }

    /// Continues the recovery from a dead process. Returns the number of started commands.
    #[cold]
    #[inline(never)]
    fn advance_recovery(&mut self, unread: Unread<'_>, trace: &mut Option<Observer>) -> u32 {
        let Some(recovery) = &mut self.recovery else { return 0 };
        let started = recovery.advance(&mut self.set, unread, trace);
        self.recovery.take_if(|recovery| recovery.is_finished());
        started
    }

    /// True if commands of a dead process wait for execution, or if a command that may have crashed
    /// the process is in flight.
    fn has_replays(&self) -> bool {
        let has = |recovery: &Recovery| recovery.has_replays() || recovery.has_turn();
        self.recovery.as_deref().is_some_and(has)
    }

    /// Serves the queues from index `first` on, which the last pass did not serve for lack of
    /// budget.
    #[inline(never)]
    fn serve_from(
        &mut self,
        first: usize,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        // Without budget, the queues are not served; `first` stays for the next pass.
        if self.set.engine.has_budget() {
            self.first = 0;
        }
        (first..self.set.sqs.len()).map(|index| self.serve(index, unread, trace)).sum()
    }

    #[inline]
    fn serve(&mut self, index: usize, unread: Unread<'_>, trace: &mut Option<Observer>) -> u32 {
        let Some(tail) = self.set.poll_tail(index, trace) else { return 0 };
        // Messages that were sent before the host moved the tail must be handled first: for
        // example, a message may contain the memory that the host has just mapped for these
        // commands. The tail was loaded with acquire ordering, so all these messages are visible
        // here.
        if unread.has_of(self.id()) {
            return 1;
        }
        if !self.set.engine.has_budget() || self.set.engine.is_full() {
            return self.defer();
        }
        let fetched = match &mut self.overriding {
            None => self.set.serve(index, tail, trace),
            Some(overriding) => overriding.fetch(&mut self.set, index, tail, trace),
        };
        if !self.set.engine.has_budget() {
            self.first = index + 1;
        }
        fetched
    }

    /// Defers the commands of a queue: for lack of budget until the next pass, or at an in-flight
    /// limit until a command in flight ends.
    #[cold]
    #[inline(never)]
    fn defer(&mut self) -> u32 {
        let Some(exceeded) = self.set.engine.exceeded() else {
            return u32::from(!self.set.engine.is_full());
        };
        // With sparse guest memory, even a host with a normal load can reach the limit `Pieces`
        // while page tables are created. That is not logged.
        let is_quota = exceeded != Exceeded::Pieces || !self.set.engine.is_sparse();
        if is_quota && self.set.shared.is_first_excess() {
            let controller = self.set.shared.id;
            tracing::warn!(
                controller,
                "in-flight limit of the controller reached: {exceeded}; further commands wait in \
                 their queues until some have ended (logged once)"
            );
        }
        0
    }

    /// Checks if guest memory was lost (SIGBUS), and reports that once per DMA map. Only the
    /// current DMA map is scanned, because a client may lose memory in tens of thousands of older
    /// ones.
    #[cold]
    pub(crate) fn check_memory(&mut self) {
        let losses = shadowbell_memory::sigbus::losses(self.set.shared.id);
        if std::mem::replace(&mut self.losses, losses) == losses || self.lost_memory_reported {
            return;
        }
        if self.set.engine.view().table().is_poisoned() {
            self.lost_memory_reported = true;
            self.set.control.notify(Notice::MemoryLost);
        }
    }

    /// Ends the pending operations (drained maps, deleted queues, replaced disks) that wait for no
    /// more commands, and releases their latches.
    fn finish(&mut self) {
        while self.draining.front().is_some_and(|(watch, _)| watch.is_idle()) {
            self.draining.pop_front();
        }
        let mut index = 0;
        while index < self.deleting.len() {
            let can_be_removed = match &self.deleting[index].0 {
                Deleting::Sq(sq) => {
                    let sq = &mut self.set.sqs[*sq];
                    match sq.take_if(|sq| sq.in_flight == 0) {
                        Some(sq) => {
                            self.set.shared.retire_sq(&sq.counters);
                            true
                        }
                        None => sq.is_none(),
                    }
                }
                Deleting::Disk(place, epoll) => match self.set.engine.take_drained(*place) {
                    Some(disk) => {
                        disk.unwatch(epoll);
                        true
                    }
                    None => false,
                },
                Deleting::AllButExclusive => {
                    let has_more = |recovery: &Recovery| recovery.needs_exclusive();
                    self.set.engine.is_drained() && !self.recovery.as_deref().is_some_and(has_more)
                }
                Deleting::Everything => false,
            };
            if can_be_removed {
                self.deleting.swap_remove(index);
            } else {
                index += 1;
            }
        }
    }

    /// Arms the doorbells before a sleep (first phase).
    pub(crate) fn arm(&mut self, arming: &mut Arming<'_, SleepCell>, trace: &mut Option<Observer>) {
        self.set.arm(arming, trace);
    }

    /// Rechecks the doorbells before a sleep (second phase). Returns the time at which the first
    /// interrupt is due that Interrupt Coalescing holds back.
    pub(crate) fn recheck(
        &mut self,
        fenced: &mut Fenced<'_, SleepCell>,
        trace: &mut Option<Observer>,
    ) -> Option<Instant> {
        self.set.recheck(fenced, trace)
    }

    /// Reads the heads of all completion queues, and reports invalid ones.
    pub(crate) fn check_heads(&mut self, trace: &mut Option<Observer>) {
        self.set.check_heads(trace);
    }

    /// Disarms the doorbells after a sleep.
    pub(crate) fn disarm(&mut self, sleeper: &Sleeper<SleepCell>) {
        self.set.disarm(sleeper);
    }

    fn override_is_waiting(&self) -> bool {
        self.overriding.as_ref().is_some_and(|overriding| overriding.is_waiting())
    }

    /// True if a pending operation has to be polled, because no event signals its end. The thread
    /// must then sleep only briefly.
    pub(crate) fn needs_polling(&self) -> bool {
        let waited_for = !(self.draining.is_empty() && self.deleting.is_empty());
        self.override_is_waiting()
            || self.page_table_check.is_some()
            || !self.is_pending() && (waited_for || self.can_replay())
    }

    /// True if a recovered command waits to be executed again, and no completion queue is full. A
    /// full one would delay it until the host writes the head.
    fn can_replay(&self) -> bool {
        self.has_replays() && self.set.sqs.iter().flatten().all(|sq| !sq.blocked)
    }

    /// True if the host writes mapped doorbells, which do not wake the thread.
    pub(crate) fn is_mapped(&self) -> bool {
        self.set.shared.mapped
    }

    /// True if only a doorbell or a message can start further work: nothing is in flight or held,
    /// and no latch waits.
    pub(crate) fn is_quiescent(&self) -> bool {
        !self.override_is_waiting()
            && !self.is_pending()
            && self.draining.is_empty()
            && self.deleting.is_empty()
            && !self.is_detaching()
            && self.departure.is_none()
            && self.page_table_check.is_none()
            && !self.has_replays()
            && !self.set.has_held_completions()
    }

    /// Progress counter: number of fetched commands plus posted completions, modulo 2^64.
    pub(crate) fn progress(&self) -> u64 {
        self.set.progress()
    }
}

/// Inserts an item at the first free index and returns the index. Other items keep their indices.
pub(super) fn insert<T>(list: &mut Vec<Option<T>>, item: T) -> usize {
    let place = list.iter().position(Option::is_none).unwrap_or(list.len());
    if place == list.len() {
        list.push(None);
    }
    list[place] = Some(item);
    place
}

/// Queue creation, deletion and remapping of queue memory.
impl ControllerQueues {
    fn shadow_cells(&self, offset: u64) -> Option<ShadowCells> {
        ShadowCells::resolve(&self.table(), self.shadow?, offset)
    }

    pub(crate) fn create_cq(&mut self, layout: QueueLayout, vector: Option<u16>, limit: HoldLimit) {
        let shared = &self.set.shared;
        let irq = vector.map(|v| IrqLine::new(Arc::clone(&shared.irqs), v));
        let mut cq = Cq::new(layout, shared, irq, limit);
        // The control plane has refused unmapped memory. If the memory was unmapped since then, the
        // queue waits.
        let _ = cq.resolve(&self.table());
        // A new doorbell has no earlier value that could be invalid.
        let _ = cq.shadow(self.shadow_cells(cq_entry_offset(layout.qid, DSTRD)));
        insert(&mut self.set.cqs, cq);
        self.write_down();
    }

    pub(crate) fn create_sq(&mut self, layout: QueueLayout, cqid: u16) -> Result<(), Status> {
        let cq = self.set.find_cq(cqid).ok_or(Status::CQ_INVALID.with_dnr())?;
        let mut sq = Sq::new(layout, &self.set.shared, cq);
        let _ = sq.resolve(&self.table());
        let _ = sq.shadow(self.shadow_cells(sq_entry_offset(layout.qid, DSTRD)));
        insert(&mut self.set.sqs, sq);
        self.write_down();
        Ok(())
    }

    /// Writes the state of all queues to the journal. Called after a change of a queue or of the
    /// location of a doorbell.
    pub(super) fn write_down(&self) {
        if let Some(journal) = &self.set.journal {
            for sq in self.set.sqs.iter().flatten() {
                let cq = self.set.cqs.get(sq.cq).and_then(Option::as_ref);
                sq.write_down(journal, cq.map_or(0, Cq::posted));
            }
            self.set.cqs.iter().flatten().for_each(|cq| cq.write_down(journal));
        }
    }

    pub(crate) fn delete_sq(&mut self, qid: u16, latch: Latch) {
        let Some(index) = self.set.find_sq(qid) else { return };
        if let Some(sq) = &mut self.set.sqs[index] {
            sq.stopped = true;
        }
        self.set.engine.cancel_all(Some(index));
        if let Some(overriding) = &mut self.overriding {
            overriding.delete_sq(&mut self.set, index);
        }
        self.deleting.push((Deleting::Sq(index), latch));
    }

    pub(crate) fn delete_cq(&mut self, qid: u16) {
        let index = self.set.find_cq(qid);
        if let Some(cq) = index.and_then(|i| self.set.cqs[i].take()) {
            self.set.shared.retire_cq(&cq.counters);
        }
    }

    /// Applies Doorbell Buffer Config: every queue switches to its entry of the shadow buffer.
    /// Commands may be in flight. `None` removes the buffer; queues that used it stop.
    pub(crate) fn change_shadow(
        &mut self,
        pages: Option<(u64, u64)>,
        trace: &mut Option<Observer>,
    ) {
        self.shadow = pages;
        let table = self.table();
        let cells = |offset| ShadowCells::resolve(&table, pages?, offset);
        let mut invalid = Vec::new();
        for sq in self.set.sqs.iter_mut().flatten() {
            let qid = sq.layout.qid;
            let outcome = sq.shadow(cells(sq_entry_offset(qid, DSTRD)));
            invalid.extend(outcome.err().map(|error| (qid, error)));
        }
        for cq in self.set.cqs.iter_mut().flatten() {
            let qid = cq.layout.qid;
            let outcome = cq.shadow(cells(cq_entry_offset(qid, DSTRD)));
            invalid.extend(outcome.err().map(|error| (qid | COMPLETION_QUEUE, error)));
        }
        for (qid, error) in invalid {
            self.set.invalid(qid, error, trace);
        }
        self.write_down();
    }

    /// Replaces the DMA map and resolves the queues in the new map. A queue that the new map does
    /// not contain stops until a later map contains it. The state of shadow doorbells does not
    /// change.
    pub(crate) fn change_table(&mut self, table: Arc<DmaTable>, latches: Vec<Latch>) {
        let old = self.set.engine.change_view(View::new(Arc::clone(&table)));
        self.lost_memory_reported = false;
        self.draining.push_back((old.watch(), latches));
        drop(old);
        let pages = self.shadow;
        self.set.sqs.iter_mut().flatten().for_each(|sq| sq.remap(&table, pages));
        self.set.cqs.iter_mut().flatten().for_each(|cq| cq.remap(&table, pages));
        self.write_down();
    }
}

/// Departure and arrival of queues that move between I/O threads.
impl ControllerQueues {
    /// Begins a move to another I/O thread: fetching stops. When nothing is in flight any more,
    /// [`can_be_removed`](Self::can_be_removed) returns true.
    pub(crate) fn start_move(&mut self, departure: Departure) {
        self.set.engine.close(Closed::Leaves);
        self.departure = Some(departure);
    }

    /// Cancels a move that has not happened yet.
    pub(crate) fn cancel_move(&mut self) {
        if self.departure.take().is_some() {
            self.set.engine.open(Closed::Leaves);
        }
    }

    /// Aborts commands in flight, because a controller reset waits for the pending move to end.
    pub(crate) fn hurry(&mut self) {
        if self.departure.is_some() {
            self.recovery = None;
            self.set.engine.cancel_all(None);
            if let Some(overriding) = &mut self.overriding {
                overriding.reset();
            }
        }
    }

    /// Sends the queues to their destination, unless they are being detached. Returns true if they
    /// were sent.
    pub(crate) fn depart(&mut self, worker: usize) -> bool {
        let Some(Departure { to, latch }) = self.departure.take() else { return false };
        if self.is_detaching() {
            return false;
        }
        let table = self.table();
        // At the destination, a namespace change may end before `self` is dropped. So the queues of
        // this thread must not refer to the old disk any more.
        self.set.engine.drop_namespaces();
        // Nothing is in flight, so the log of dirty pages is complete. A live migration may read it
        // at once.
        self.set.engine.view().flush_log();
        // At the destination (a thread or another process), all commands are served normally.
        self.recovery = None;
        self.set.sqs.iter_mut().flatten().for_each(|sq| sq.careful = false);
        if let Some(journal) = &self.set.journal {
            self.set.cqs.iter_mut().flatten().for_each(|cq| cq.detach_journal(journal));
        }
        let relocated = Relocated {
            shared: Arc::clone(&self.set.shared),
            control: self.set.control.clone(),
            opening: self.opening.take(),
            table,
            counters: Arc::clone(&self.set.engine.counters),
            shadow: self.shadow,
            sqs: std::mem::take(&mut self.set.sqs),
            cqs: std::mem::take(&mut self.set.cqs),
            overriding: self.overriding.take(),
            doorbell_eventfds: std::mem::take(&mut self.doorbell_eventfds),
            losses: self.losses,
            lost_memory_reported: self.lost_memory_reported,
            inheritance: Inheritance::default(),
            latch: Some(latch),
        };
        // The front end stores a trapped doorbell value, then reads the owner. So either it sees
        // the new owner and wakes that thread, or the destination sees the stored value.
        self.set.shared.change_owner(worker, to.worker);
        to.arrivals.deliver(Box::new(relocated));
        true
    }

    /// Receives moved queues on the calling I/O thread, which has the index `worker`. If a disk
    /// cannot be opened, the queues are dropped.
    pub(crate) fn move_in(
        relocated: Relocated,
        worker: usize,
    ) -> Result<(Self, Option<Latch>), std::io::Error> {
        let Relocated { shared, control, opening, table, shadow, sqs, cqs, .. } = relocated;
        let Relocated {
            overriding, doorbell_eventfds, losses, lost_memory_reported, latch, ..
        } = relocated;
        let Relocated { counters, inheritance, .. } = relocated;
        let journal = shared.journal_part(worker, opening.generation)?;
        counters.set_worker(worker);
        let mut set = QueueSet::new(shared, control, opening.open(table, counters)?, journal);
        (set.sqs, set.cqs) = (sqs, cqs);
        if let Some(journal) = &mut set.journal {
            set.cqs.iter_mut().flatten().for_each(|cq| cq.join_journal(journal));
        }
        let moved = Self {
            recovery: Recovery::new(inheritance, &mut set),
            set,
            overriding,
            shadow,
            doorbell_eventfds,
            draining: VecDeque::new(),
            deleting: Vec::new(),
            detaching: Vec::new(),
            losses,
            lost_memory_reported,
            first: 0,
            opening,
            departure: None,
            page_table_check: None,
        };
        moved.write_down();
        Ok((moved, latch))
    }

    /// Merges moved queues into the queues of the same controller on this thread.
    pub(crate) fn absorb(&mut self, relocated: Relocated) -> Option<Latch> {
        let Relocated { sqs, cqs, counters, doorbell_eventfds, latch, inheritance, .. } = relocated;
        self.set.shared.merge_parts(&counters, &self.set.engine.counters);
        // The moved queues were resolved in the DMA map of their previous thread.
        let (table, pages) = (self.table(), self.shadow);
        let mut places = Vec::with_capacity(cqs.len());
        for cq in cqs {
            let journal = self.set.journal.as_mut();
            places.push(cq.map(|mut cq| {
                cq.remap(&table, pages);
                if let Some(journal) = journal {
                    cq.join_journal(journal);
                }
                insert(&mut self.set.cqs, cq)
            }));
        }
        let mut indices = Vec::with_capacity(sqs.len());
        for sq in sqs {
            indices.push(sq.and_then(|mut sq| {
                // A submission queue and its completion queue are always on the same I/O thread.
                sq.cq = places.get(sq.cq).copied().flatten()?;
                sq.remap(&table, pages);
                Some(insert(&mut self.set.sqs, sq))
            }));
        }
        // After a crash, several threads may recover queues of one controller. If the queues are
        // then moved to one thread, their recoveries are joined.
        let inheritance = inheritance.moved(|sq| indices.get(sq).copied().flatten());
        if let Some(more) = Recovery::new(inheritance, &mut self.set) {
            match &mut self.recovery {
                Some(recovery) => recovery.join(*more),
                None => self.recovery = Some(more),
            }
        }
        self.doorbell_eventfds.extend(doorbell_eventfds);
        self.write_down();
        latch
    }
}
