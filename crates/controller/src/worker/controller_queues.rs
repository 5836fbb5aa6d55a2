//! One controller, as far as one worker serves it.

use super::backlog::Unread;
use super::message::QueueContext;
use super::observer::Observer;
use super::queue_override::QueueOverride;
use super::queue_set::{QueueSet, SleepCell};
use super::recovery::Recovery;
use super::relocation::{Departure, Opening};
use crate::admin::self_test::Piece;
use crate::exec::{Closed, Exceeded, NamespaceQueue};
use crate::latch::Latch;
use crate::namespace::Namespaces;
use crate::notice::Notice;
use crate::queue::Cq;
use crate::shared::ControllerShared;
use shadowbell_doorbell::{Arming, Fenced, Sleeper};
use shadowbell_memory::page_tables::{self, Look};
use shadowbell_memory::{DmaTable, EventFd, ViewWatch};
use shadowbell_spec::status::Status;
use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What is forgotten once nothing of it is under way.
pub(super) enum Deleting {
    /// The submission queue of this index.
    Sq(usize),
    /// The queue to a disk that is retired at this place, and what has woken the worker for it.
    Disk(usize, Arc<OwnedFd>),
    /// What is under way, but for what has to be alone.
    Others,
    /// All of it.
    Everything,
}

/// One controller's queues on one worker.
pub(crate) struct ControllerQueues {
    pub(super) set: QueueSet,
    pub(super) overriding: Option<Box<dyn QueueOverride>>,
    pub(super) shadow: Option<(u64, u64)>,
    /// Descriptors that have the worker look at this controller's doorbells.
    pub(super) doorbell_eventfds: Vec<Arc<EventFd>>,
    /// Old DMA maps that commands in flight may still use, with who waits for their end: and for
    /// that of all before, because what is in one map may have been in those, too.
    pub(super) draining: VecDeque<(ViewWatch, Vec<Latch>)>,
    /// What is to be forgotten once nothing of it is under way.
    pub(super) deleting: Vec<(Deleting, Latch)>,
    pub(super) detaching: Option<Latch>,
    /// `memory::sigbus::losses` when it was last looked at: what was lost before the first queue
    /// was created is still in the map.
    pub(super) losses: u64,
    /// The loss of something in the present map has been reported.
    pub(super) lost: bool,
    /// The submission queue that is looked at first in the next pass: behind the one at which the
    /// budget of the last one ended.
    pub(super) first: usize,
    /// What it was opened from.
    pub(super) opening: Opening,
    /// It is to be served by another worker from when nothing of it is under way.
    pub(super) departure: Option<Departure>,
    /// What it waits for, because it has touched so much of the host's memory here and there.
    pub(super) look: Option<Look>,
    /// What is left of a process that is dead.
    pub(super) recovery: Option<Box<Recovery>>,
}

impl ControllerQueues {
    /// Opens the namespaces for this thread, which is that of `worker`.
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
            look: None,
            doorbell_eventfds: Vec::new(),
            draining: VecDeque::new(),
            deleting: Vec::new(),
            detaching: None,
            losses: 0,
            lost: false,
            first: 0,
        })
    }

    pub(crate) fn id(&self) -> u32 {
        self.set.shared.id
    }

    /// Says to whoever reads the statistics whether the worker leaves this out of its passes.
    pub(super) fn set_left_out(&self, left_out: bool) {
        self.set.engine.counters.set_left_out(left_out);
    }

    pub(crate) fn shared(&self) -> &Arc<ControllerShared> {
        &self.set.shared
    }

    pub(crate) fn namespaces(&self) -> &[NamespaceQueue] {
        self.set.engine.namespaces()
    }

    /// What wakes the worker for its disks.
    pub(crate) fn wake_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.set.engine.queues().flat_map(NamespaceQueue::wake_fds)
    }

    /// Namespace `nsid` is the one of `namespaces`, or none, from the next command on. If its disk
    /// can not be opened, all stays as it is, and the latch gets a status.
    pub(crate) fn change_namespace(
        &mut self,
        nsid: u32,
        namespaces: &Arc<Namespaces>,
        latch: Latch,
        epoll: &Arc<OwnedFd>,
    ) {
        if self.detaching.is_some() {
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
                tracing::error!(nsid, %error, "a worker can not open a namespace's disk");
                latch.set_status(Status::INTERNAL);
            }
        }
    }

    /// From now on, something else serves the queues.
    pub(crate) fn set_override(&mut self, overriding: Box<dyn QueueOverride>) {
        // The one before has commands to end, and knows of new faults by itself.
        self.overriding.get_or_insert(overriding);
    }

    /// Holds on to a descriptor that the worker waits for, until the queues go.
    pub(crate) fn keep_eventfd(&mut self, event: EventFd) {
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

    /// Verifies a piece of a namespace.
    pub(crate) fn verify(&mut self, piece: Piece, latch: Latch) {
        if self.detaching.is_none() {
            self.set.engine.verify(piece, latch);
        }
    }

    /// Nothing more is fetched. The latch is dropped when nothing is under way but what has to be
    /// alone.
    pub(crate) fn pause(&mut self, latch: Latch) {
        self.set.engine.pause();
        self.deleting.push((Deleting::Others, latch));
    }

    /// What has to be alone is.
    pub(crate) fn be_alone(&mut self, latch: Latch) {
        self.set.engine.be_alone(latch);
    }

    /// What has changed while a command was alone is recorded.
    pub(crate) fn settle(&mut self, latch: Latch) {
        self.set.engine.settle(latch);
    }

    /// Nothing has to be alone any more.
    pub(crate) fn go_on_with_others(&mut self) {
        self.set.engine.go_on();
    }

    /// The controller may do something else with a namespace.
    pub(crate) fn review_access(&mut self, uuid: &[u8; 16], aborts: bool, latch: &Latch) {
        self.set.engine.review_access(uuid, aborts, latch);
    }

    /// A reservation command is over.
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
        // First of all the shadow pages: after a reset they may be anybody's memory.
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
        self.detaching = Some(latch);
    }

    /// Whether an interrupt is held back for a moment.
    pub(crate) fn is_about_to_notify(&self) -> bool {
        self.set.cqs.iter().flatten().any(Cq::is_about_to_notify)
    }

    /// Whether its disks have something in hand.
    pub(crate) fn is_pending(&self) -> bool {
        self.set.engine.pending() != 0
    }

    /// How many requests have ended at its disks.
    pub(crate) fn ended(&self) -> u64 {
        self.set.engine.ended()
    }

    /// Whether it is being detached.
    pub(crate) fn is_detaching(&self) -> bool {
        self.detaching.is_some()
    }

    /// Whether its time here is over: a detach has come to its end, or it can leave for another
    /// worker. Nothing of it is in flight.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        (self.detaching.is_some() || self.departure.is_some() && !self.is_waited_for())
            && !self.is_pending()
            && !self.has_replays()
    }

    /// Whether somebody waits for something that ends here.
    fn is_waited_for(&self) -> bool {
        !(self.draining.is_empty() && self.deleting.is_empty()) || self.override_is_waiting()
    }

    /// Its turns take too long for those that it shares this worker with.
    #[cold]
    pub(crate) fn report_slow(&self, took: Duration) {
        self.set.control.notify(Notice::SlowTurns { took });
    }

    /// Folds the counters into the controller's before the queues go.
    pub(crate) fn retire(&mut self) {
        let QueueSet { shared, sqs, cqs, engine, .. } = &mut self.set;
        sqs.iter_mut().filter_map(Option::take).for_each(|sq| shared.retire_sq(&sq.counters));
        cqs.iter_mut().filter_map(Option::take).for_each(|cq| shared.retire_cq(&cq.counters));
        shared.retire_part(&engine.counters);
    }

    /// One pass: reaps the disks, fetches and starts commands, posts completions, raises
    /// interrupts. Commands are started while there is some of `budget` left, in nanoseconds. How
    /// much there was to do, in commands.
    // In the worker's loop, where nearly all passes are made, without a call.
    #[inline(always)]
    pub(crate) fn pass(
        &mut self,
        budget: i64,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        let mut work = 0;
        self.set.engine.set_budget(budget);
        if self.set.engine.is_sparse() || self.look.is_some() {
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
            work += self.go_on(unread, trace);
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

    /// The trace begins here.
    pub(crate) fn begin_trace(&mut self) {
        self.set.begin_trace();
    }

    /// Has nothing more fetched while the page tables that it has made may be too many.
    #[cold]
    #[inline(never)]
    fn bound_page_tables(&mut self) {
        if let Some(look) = self.look {
            if !look.is_over() {
                return;
            }
            self.look = None;
            self.set.engine.open(Closed::PageTables);
        } else if self.set.engine.has_spent() {
            self.set.engine.may_touch_more();
            self.look = page_tables::ask();
            if self.look.is_some() {
                self.set.engine.close(Closed::PageTables);
            }
        }
    }

    /// Goes on with what a process has left that is dead. How many commands were started.
    #[cold]
    #[inline(never)]
    fn go_on(&mut self, unread: Unread<'_>, trace: &mut Option<Observer>) -> u32 {
        let Some(recovery) = &mut self.recovery else { return 0 };
        let started = recovery.go_on(&mut self.set, unread, trace);
        self.recovery.take_if(|recovery| recovery.is_over());
        started
    }

    /// Whether commands of a process that is dead wait, or one is under way of which it may have
    /// died.
    fn has_replays(&self) -> bool {
        let has = |recovery: &Recovery| recovery.has_replays() || recovery.has_turn();
        self.recovery.as_deref().is_some_and(has)
    }

    /// Serves the queues from this one on, once: a pass that begins where the last one ended.
    #[inline(never)]
    fn serve_from(
        &mut self,
        first: usize,
        unread: Unread<'_>,
        trace: &mut Option<Observer>,
    ) -> u32 {
        // A pass without a budget leaves it to the next one.
        if self.set.engine.has_budget() {
            self.first = 0;
        }
        (first..self.set.sqs.len()).map(|index| self.serve(index, unread, trace)).sum()
    }

    #[inline]
    fn serve(&mut self, index: usize, unread: Unread<'_>, trace: &mut Option<Observer>) -> u32 {
        let Some(tail) = self.set.look(index, trace) else { return 0 };
        // What the host did before it submitted comes first: memory that it has just mapped for
        // these commands may still be in a message. The tail was loaded with acquire ordering, so a
        // message that was sent before the host moved it is seen here.
        if unread.has_of(self.id()) {
            return 1;
        }
        if !self.set.engine.has_budget() || self.set.engine.is_full() {
            return self.put_off();
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

    /// There is a command, and it has to wait: for the next turn, or for something to end.
    #[cold]
    #[inline(never)]
    fn put_off(&mut self) -> u32 {
        let Some(exceeded) = self.set.engine.exceeded() else {
            return u32::from(!self.set.engine.is_full());
        };
        // A host with a lot of memory has page tables to be made first, which takes it a moment.
        let is_quota = exceeded != Exceeded::Pieces || !self.set.engine.is_sparse();
        if is_quota && self.set.shared.is_first_excess() {
            let controller = self.set.shared.id;
            tracing::warn!(
                controller,
                "the controller has as many {exceeded} under way as one may have; more commands \
                 wait in their queues until some have ended (this is said once)"
            );
        }
        0
    }

    /// Somebody's memory was lost: whether it is this one's. A host that loses a piece in each of
    /// its tens of thousands of maps is looked through once for each map that it has, not for
    /// each piece.
    #[cold]
    pub(crate) fn check_memory(&mut self) {
        let losses = shadowbell_memory::sigbus::losses(self.set.shared.id);
        if std::mem::replace(&mut self.losses, losses) == losses || self.lost {
            return;
        }
        if self.set.engine.view().table().is_poisoned() {
            self.lost = true;
            self.set.control.notify(Notice::MemoryLost);
        }
    }

    /// Lets those go who wait for something that has come to its end.
    fn finish(&mut self) {
        while self.draining.front().is_some_and(|(watch, _)| watch.is_idle()) {
            self.draining.pop_front();
        }
        let mut index = 0;
        while index < self.deleting.len() {
            let is_over = match &self.deleting[index].0 {
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
                Deleting::Disk(place, epoll) => match self.set.engine.take_retired(*place) {
                    Some(disk) => {
                        disk.unwatch(epoll);
                        true
                    }
                    None => false,
                },
                Deleting::Others => {
                    let has_more = |recovery: &Recovery| recovery.has_some_to_be_alone();
                    self.set.engine.is_drained() && !self.recovery.as_deref().is_some_and(has_more)
                }
                Deleting::Everything => false,
            };
            if is_over {
                self.deleting.swap_remove(index);
            } else {
                index += 1;
            }
        }
    }

    /// The first half of going to sleep: arms what should wake us.
    pub(crate) fn arm(&mut self, arming: &mut Arming<'_, SleepCell>, trace: &mut Option<Observer>) {
        self.set.arm(arming, trace);
    }

    /// The second half: looks once more. When the sleep has to end, for an interrupt's sake.
    pub(crate) fn recheck(
        &mut self,
        fenced: &mut Fenced<'_, SleepCell>,
        trace: &mut Option<Observer>,
    ) -> Option<Instant> {
        self.set.recheck(fenced, trace)
    }

    /// Awake again: takes back what was asked for while asleep.
    pub(crate) fn disarm(&mut self, sleeper: &Sleeper<SleepCell>) {
        self.set.disarm(sleeper);
    }

    fn override_is_waiting(&self) -> bool {
        self.overriding.as_ref().is_some_and(|overriding| overriding.is_waiting())
    }

    /// Whether somebody waits for something that no event announces.
    pub(crate) fn needs_polling(&self) -> bool {
        let waited_for = !(self.draining.is_empty() && self.deleting.is_empty());
        self.override_is_waiting()
            || self.look.is_some()
            || !self.is_pending() && (waited_for || self.can_replay())
    }

    /// Whether commands of another process wait for something else than room.
    fn can_replay(&self) -> bool {
        self.has_replays() && self.set.sqs.iter().flatten().all(|sq| !sq.blocked)
    }

    /// Whether the host writes its doorbells itself: nothing tells a worker that it has.
    pub(crate) fn is_mapped(&self) -> bool {
        self.set.shared.mapped
    }

    /// Whether all that it could have to do would begin with a doorbell or a message: nothing is in
    /// flight, nothing held back, and nobody waits.
    pub(crate) fn is_quiescent(&self) -> bool {
        !self.override_is_waiting()
            && !self.is_pending()
            && self.draining.is_empty()
            && self.deleting.is_empty()
            && self.detaching.is_none()
            && self.departure.is_none()
            && self.look.is_none()
            && !self.has_replays()
            && !self.set.holds_back()
    }

    /// How much has been done: a number that changes with every command.
    pub(crate) fn progress(&self) -> u64 {
        self.set.progress()
    }
}

/// Puts a queue in the first hole, so that indices stay what they are. Its index.
pub(super) fn insert<T>(list: &mut Vec<Option<T>>, item: T) -> usize {
    let place = list.iter().position(Option::is_none).unwrap_or(list.len());
    if place == list.len() {
        list.push(None);
    }
    list[place] = Some(item);
    place
}
