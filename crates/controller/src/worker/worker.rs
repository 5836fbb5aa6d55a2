//! A worker: the thread that serves I/O queues.
//!
//! It passes over all controllers that are active as long as there is work, goes on doing so for a
//! while when there is none (the window adapts to how soon work comes back), then arms every
//! doorbell's EventIdx, passes a full fence, looks once more and sleeps in one wait on everything:
//! trapped doorbells, messages, and the disks. Controllers that have been idle for a while are left
//! out of all that until they ring (see `poll_group`).

use super::backlog::{Backlog, Unread};
use super::controller_queues::ControllerQueues;
use super::doorbell_sources::DoorbellSources;
use super::mailbox::Mailbox;
use super::message::{Message, QueueContext};
use super::observer::{self, Observer};
use super::poll_group::{PollEntry, PollGroup};
use super::poll_window::{Next, PollWindow, Polling};
use super::queue_set::SleepCell;
use super::relocation::Relocated;
use super::worker_thread::{ThreadJob, WorkerThread};
use crate::notice::Notice;
use crate::trace::Kind;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use shadowbell_doorbell::{FullFence, Sleeper};
use shadowbell_memory::page_tables::Awake;
use shadowbell_memory::{EventFd, epoll_wait};
use shadowbell_spec::status::Status;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A worker with a controller whose doorbells are mapped can not be woken by them: it looks at
/// least this often. A wait is one of whole milliseconds, and a timer takes some 20 us of a
/// processor.
pub(super) const MAPPED_POLL: Duration = Duration::from_millis(1);
/// A worker on which somebody waits for something that no event announces looks this often.
const UNANNOUNCED_POLL: Duration = Duration::from_millis(1);

/// The pool is gone: a worker has no more to do.
pub(super) struct Stop;

pub(super) struct Worker {
    mailbox: Arc<Mailbox>,
    backlog: Backlog,
    sleeper: Sleeper<SleepCell, FullFence>,
    /// Its number in the pool.
    index: usize,
    poll_group: PollGroup,
    /// Hosts whose doorbell writes it takes by itself.
    sources: DoorbellSources,
    /// Tokens of the descriptors that were signalled, for a moment.
    signalled: Vec<u64>,
    epoll: Arc<OwnedFd>,
    window: PollWindow,
    trace: Option<Observer>,
    /// It has slept since its last turn.
    woken: bool,
    /// While it may touch hosts' memory.
    awake: Option<Awake>,
    /// What the thread is lent to next, and by which controller.
    job: Option<(u32, ThreadJob)>,
}

impl Worker {
    pub(super) fn new(index: usize, mailbox: Arc<Mailbox>, polling: Polling) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(CreateFlags::CLOEXEC)?);
        // Edge-triggered: a signal wakes us once, and need not be read away.
        epoll::add(&epoll, &mailbox.event, EventData::new_u64(0), EventFlags::IN | EventFlags::ET)?;
        Ok(Self {
            sleeper: Sleeper::new(Arc::clone(&mailbox.state)),
            mailbox,
            backlog: Backlog::default(),
            index,
            poll_group: PollGroup::new(polling == Polling::Always),
            sources: DoorbellSources::default(),
            signalled: Vec::new(),
            epoll,
            window: PollWindow::new(polling),
            trace: None,
            woken: false,
            awake: Some(Awake::new()),
            job: None,
        })
    }

    pub(super) fn run(&mut self) {
        loop {
            match self.turn() {
                Err(Stop) => return,
                Ok(true) if self.job.is_some() => {
                    if self.lend() {
                        return;
                    }
                    continue;
                }
                Ok(true) => {
                    self.found();
                    continue;
                }
                Ok(false) => {}
            }
            if !self.looks_again() {
                self.sleep(None);
                self.window.restart();
            }
        }
    }

    /// After a turn that found nothing: whether to look again before a sleep.
    fn looks_again(&mut self) -> bool {
        std::hint::spin_loop();
        let Self { window, poll_group, .. } = self;
        let next = match window.next(|| (poll_group.is_pending(), poll_group.ended())) {
            Next::Look => return true,
            Next::Yield => window.give_way(),
            Next::Sleep => Next::Sleep,
        };
        if next != Next::Sleep {
            return true;
        }
        let polite = poll_group.active.iter().any(|e| e.queues.is_about_to_notify());
        if polite {
            std::thread::yield_now();
        }
        polite
    }

    /// A turn has found something.
    fn found(&mut self) {
        let Self { window, poll_group, .. } = self;
        window.found(|| poll_group.ended());
    }

    /// Lends the thread until the job is done. Whether the pool is gone.
    fn lend(&mut self) -> bool {
        let Some((controller, job)) = self.job.take() else { return false };
        let mut lent = JobThread { worker: self, controller, is_stopped: false };
        job(&mut lent);
        let is_stopped = lent.is_stopped;
        self.window.restart();
        is_stopped
    }

    /// Messages, then a pass over the queues of all active controllers. Whether there was anything
    /// to do.
    pub(super) fn turn(&mut self) -> Result<bool, Stop> {
        let mut busy = false;
        if self.poll_group.must_check_eventfds() {
            self.check_eventfds();
        }
        if self.mailbox.has_messages() || !self.backlog.is_empty() {
            busy = true;
            if self.backlog.add(self.mailbox.take()) {
                return Err(Stop);
            }
            let mut backlog = std::mem::take(&mut self.backlog);
            backlog.take_turn(|message| self.handle(message));
            self.backlog = backlog;
        }
        let Self { poll_group, mailbox, backlog, trace, .. } = self;
        let unread = Unread { mailbox, backlog };
        let mut work = poll_group.pass(unread, trace);
        work += poll_group.check_others(work, unread, trace);
        busy |= work != 0;
        if self.poll_group.active.iter().any(|entry| entry.queues.is_over()) {
            self.poll_group.remove_over(&self.epoll, self.index);
        }
        if std::mem::take(&mut self.woken) && !busy {
            self.mailbox.sleeps.spurious_wakes.add(1);
            record(&mut self.trace, Kind::SpuriousWake, 0);
        }
        Ok(busy)
    }

    /// Arms, looks once more, and sleeps if there is nothing, for `limit` at most. Whether it did.
    pub(super) fn sleep(&mut self, limit: Option<Duration>) -> bool {
        self.sleep_by(limit, wait)
    }

    /// As [`sleep`](Self::sleep), in a `sleep` of somebody else that says whether the worker's
    /// own descriptor has ended it.
    pub(super) fn sleep_in(&mut self, sleep: &mut dyn FnMut(Option<Duration>) -> bool) -> bool {
        self.sleep_by(None, |epoll, timeout, trace, signalled| {
            !sleep(timeout) || wait(epoll, Some(Duration::ZERO), trace, signalled)
        })
    }

    /// As [`sleep`](Self::sleep), with `wait` for [`wait`].
    fn sleep_by(
        &mut self,
        limit: Option<Duration>,
        wait: impl FnOnce(&OwnedFd, Option<Duration>, &mut Option<Observer>, &mut Vec<u64>) -> bool,
    ) -> bool {
        self.poll_group.park_idle(&mut self.trace);
        let mut arming = self.sleeper.prepare();
        for entry in &mut self.poll_group.active {
            entry.queues.arm(&mut arming, &mut self.trace);
        }
        let mut fenced = arming.fence();
        let mut deadline: Option<Instant> = None;
        let mut poll_after = limit;
        for PollEntry { queues, .. } in self.poll_group.active.iter_mut().map(|entry| &mut **entry)
        {
            if let Some(until) = queues.recheck(&mut fenced, &mut self.trace) {
                deadline = Some(deadline.map_or(until, |d| d.min(until)));
            }
            if queues.is_mapped() {
                poll_after = Some(MAPPED_POLL);
            }
            if queues.needs_polling() {
                poll_after = poll_after.or(Some(UNANNOUNCED_POLL));
            }
        }
        fenced.note(self.mailbox.has_messages() || !self.backlog.is_empty());
        self.mailbox.sleeps.rounds.add(1);
        let slept = match fenced.try_sleep() {
            None => {
                self.mailbox.sleeps.stayed_awake.add(1);
                None
            }
            Some(asleep) => {
                self.mailbox.sleeps.sleeps.add(1);
                record(&mut self.trace, Kind::Sleep, 0);
                let before = Instant::now();
                self.mailbox.busy.sleeps(before);
                let left = deadline.map(|d| d.saturating_duration_since(before));
                let timeout = match (left, poll_after) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                };
                self.awake = None;
                let all = wait(&self.epoll, timeout, &mut self.trace, &mut self.signalled);
                self.awake = Some(Awake::new());
                drop(asleep);
                let slept = before.elapsed();
                self.mailbox.busy.wakes();
                record(&mut self.trace, Kind::Wake, slept.as_micros().min(u32::MAX.into()) as u32);
                self.window.slept(slept);
                Some(all)
            }
        };
        let Self { poll_group, sleeper, .. } = self;
        poll_group.active.iter_mut().for_each(|entry| entry.queues.disarm(sleeper));
        if let Some(all) = slept {
            self.take_signalled(all);
            self.woken = true;
        }
        slept.is_some()
    }

    /// Checks the descriptors that were signalled for controllers while the worker was awake.
    #[cold]
    fn check_eventfds(&mut self) {
        let all = wait(&self.epoll, Some(Duration::ZERO), &mut self.trace, &mut self.signalled);
        self.take_signalled(all);
    }

    /// Does what the signalled descriptors ask for; `all` says whether there are no more of them.
    fn take_signalled(&mut self, all: bool) {
        for token in self.signalled.drain(..) {
            let controller = (token >> 8) as u32;
            self.poll_group.doorbell_written(controller);
            if token & 0xff == DOORBELL_SOURCE {
                self.sources.poll_doorbells(controller, self.index, &mut self.trace);
            }
        }
        self.poll_group.checked(all);
    }

    /// The most messages that have waited at a time since this was last asked.
    pub(super) fn most_messages(&mut self) -> usize {
        self.mailbox.take_most().max(self.backlog.take_most())
    }

    fn queues(&mut self, controller: u32) -> Option<&mut ControllerQueues> {
        self.poll_group.activate(controller)
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::CreateCq { context, layout, vector, latch } => {
                let limit = self.window.polling().hold_limit();
                match self.find_or_open(*context) {
                    Some(queues) => queues.create_cq(layout, vector, limit),
                    None => latch.set_status(Status::INTERNAL),
                }
            }
            Message::CreateSq { controller, layout, cqid, latch } => {
                let created = match self.queues(controller) {
                    Some(queues) => queues.create_sq(layout, cqid),
                    None => Err(Status::CQ_INVALID.with_dnr()),
                };
                if let Err(status) = created {
                    latch.set_status(status);
                }
            }
            Message::DeleteSq { controller, qid, latch } => {
                if let Some(queues) = self.queues(controller) {
                    queues.delete_sq(qid, latch);
                }
            }
            Message::DeleteCq { controller, qid, latch } => {
                if let Some(queues) = self.queues(controller) {
                    queues.delete_cq(qid);
                }
                drop(latch);
            }
            Message::Shadow { controller, pages, latch } => {
                if let Some(queues) = self.queues(controller) {
                    queues.change_shadow(pages);
                }
                drop(latch);
            }
            Message::Table { controller, table, latches } => {
                self.poll_group.activate(controller);
                // One that is on its way out holds on to the old map as well.
                let active = self.poll_group.active.iter_mut().map(|entry| &mut entry.queues);
                for queues in active.filter(|queues| queues.id() == controller) {
                    queues.change_table(Arc::clone(&table), latches.clone());
                }
            }
            Message::ChangeNamespace { controller, nsid, namespaces, latch } => {
                self.poll_group.activate(controller);
                // One that is on its way out uses the disk as well.
                let Self { poll_group, epoll, .. } = self;
                let active = poll_group.active.iter_mut().map(|entry| &mut entry.queues);
                for queues in active.filter(|queues| queues.id() == controller) {
                    queues.change_namespace(nsid, &namespaces, latch.clone(), epoll);
                }
            }
            Message::ReviewAccess { controller, uuid, aborts, latch } => {
                self.poll_group.activate(controller);
                // One that is on its way out may have something under way, too.
                let active = self.poll_group.active.iter_mut().map(|entry| &mut entry.queues);
                for queues in active.filter(|queues| queues.id() == controller) {
                    queues.review_access(&uuid, aborts, &latch);
                }
            }
            Message::ReservationEnded { controller, ticket, status } => {
                self.poll_group.activate(controller);
                let active = self.poll_group.active.iter_mut().map(|entry| &mut entry.queues);
                for queues in active.filter(|queues| queues.id() == controller) {
                    queues.reservation_ended(ticket, status);
                }
            }
            Message::DoorbellWritten { controller } => {
                self.poll_group.doorbell_written(controller);
            }
            Message::DoorbellEventfd { controller, event } => {
                if self.queues(controller).is_none() {
                    return;
                }
                if let Err(error) = self.watch_eventfd(controller, &event) {
                    tracing::warn!(%error, "a worker can not wait for a controller's doorbells");
                } else if let Some(queues) = self.queues(controller) {
                    queues.keep_eventfd(event);
                }
            }
            Message::DoorbellSource { controller, source } => {
                let Self { poll_group, sources, epoll, .. } = self;
                if let Some(queues) = poll_group.activate(controller) {
                    let token = DOORBELL_SOURCE | u64::from(controller) << 8;
                    sources.add(source, queues.shared(), epoll, token);
                }
            }
            Message::Flush { context, latch } => match self.find_or_open(*context) {
                Some(queues) => queues.flush(latch),
                None => latch.set_status(Status::INTERNAL),
            },
            Message::Verify { context, piece, latch } => match self.find_or_open(*context) {
                Some(queues) => queues.verify(piece, latch),
                None => latch.set_status(Status::INTERNAL),
            },
            Message::Abort { controller, sqid, cid, latch } => {
                if let Some(queues) = self.queues(controller) {
                    queues.abort(sqid, cid, latch);
                }
            }
            Message::Detach { controller, latch } => {
                self.sources.remove(controller);
                if let Some(queues) = self.queues(controller) {
                    queues.detach(latch);
                }
            }
            Message::Leave { controller, departure } => {
                // Its host's doorbells come to the other one from then on.
                self.sources.remove(controller);
                if let Some(queues) = self.queues(controller) {
                    queues.leave(departure);
                }
            }
            Message::Stay { controller } => {
                if let Some(queues) = self.queues(controller) {
                    queues.stay();
                }
            }
            Message::Pause { controller, latch } => {
                if let Some(queues) = self.queues(controller) {
                    queues.pause(latch);
                }
            }
            Message::Alone { controller, latch } => {
                if let Some(queues) = self.queues(controller) {
                    queues.be_alone(latch);
                }
            }
            Message::Settle { controller, latch } => {
                if let Some(queues) = self.queues(controller) {
                    queues.settle(latch);
                }
            }
            Message::GoOn { controller } => {
                if let Some(queues) = self.queues(controller) {
                    queues.go_on_with_others();
                }
            }
            Message::Hurry { controller } => {
                if let Some(queues) = self.queues(controller) {
                    queues.hurry();
                }
            }
            Message::Arrive(relocated) => self.arrive(*relocated),
            Message::Override { controller, overriding } => {
                if let Some(queues) = self.queues(controller) {
                    queues.set_override(overriding);
                }
            }
            Message::Trace(ring) => {
                observer::trace(&mut self.trace, ring);
                self.poll_group.begin_trace();
            }
            Message::Measure(on) => {
                observer::measure(&mut self.trace, on);
                self.poll_group.begin_trace();
            }
            Message::Run { controller, job } => self.job = Some((controller, job)),
            Message::Visit(visit) => drop(visit),
            Message::Stop => {}
        }
    }

    /// Wakes from here on when a disk of these queues has done something.
    fn watch(&self, queues: &ControllerQueues) -> io::Result<()> {
        queues.namespaces().iter().try_for_each(|namespace| namespace.watch(&self.epoll))
    }

    /// Takes over a controller that another worker has served.
    fn arrive(&mut self, relocated: Relocated) {
        let (controller, control) = (relocated.id(), relocated.control().clone());
        let watched: io::Result<()> = relocated
            .doorbell_eventfds()
            .iter()
            .try_for_each(|event| self.watch_eventfd(controller, event));
        let arrived = watched.and_then(|()| {
            if let Some(queues) = self.queues(controller) {
                return Ok(queues.absorb(relocated));
            }
            let (queues, latch) = ControllerQueues::arrive(relocated, self.index)?;
            self.watch(&queues)?;
            let state = queues.shared().park_state(self.index).map(Arc::clone);
            self.poll_group.add(queues, state.unwrap_or_default());
            Ok(latch)
        });
        if let Err(error) = arrived {
            tracing::error!(%error, "a worker can not take over a controller from another");
            control.notify(Notice::Stranded);
        }
    }

    /// Wakes from here on when `event` is signalled, which stands for doorbells of a controller.
    fn watch_eventfd(&self, controller: u32, event: &EventFd) -> io::Result<()> {
        // Edge-triggered as the mailbox. One that is signalled already counts as an edge.
        let flags = EventFlags::IN | EventFlags::ET;
        let data = EventData::new_u64(DOORBELL_EVENTFD | u64::from(controller) << 8);
        Ok(epoll::add(&self.epoll, event, data, flags)?)
    }

    /// The queues of a controller, which are made if it has none here yet.
    fn find_or_open(&mut self, context: QueueContext) -> Option<&mut ControllerQueues> {
        let shared = Arc::clone(&context.shared);
        if self.queues(shared.id).is_none() {
            let opened = ControllerQueues::new(context, self.index)
                .and_then(|queues| self.watch(&queues).map(|()| queues));
            match opened {
                Ok(queues) => {
                    let state = shared.park_state(self.index).map(Arc::clone);
                    self.poll_group.add(queues, state.unwrap_or_default());
                }
                Err(error) => {
                    tracing::error!(%error, "a worker can not open a namespace's disk");
                    return None;
                }
            }
        }
        self.queues(shared.id)
    }
}

/// The worker in the hands of whom its thread is lent to.
struct JobThread<'a> {
    worker: &'a mut Worker,
    /// Who has lent it.
    controller: u32,
    /// The pool is gone.
    is_stopped: bool,
}

impl WorkerThread for JobThread<'_> {
    fn turn(&mut self) -> bool {
        if self.is_stopped {
            return false;
        }
        let turn = self.worker.turn();
        self.is_stopped = turn.is_err();
        let busy = turn.unwrap_or(false);
        if busy {
            self.worker.found();
        }
        busy
    }

    fn looks_again(&mut self) -> bool {
        !self.is_stopped && self.worker.looks_again()
    }

    fn sleep(&mut self, wait: &mut dyn FnMut(Option<Duration>) -> bool) -> bool {
        let slept = !self.is_stopped && self.worker.sleep_in(wait);
        self.worker.window.restart();
        slept
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.worker.epoll.as_fd()
    }

    fn serves_lender(&self) -> bool {
        !self.is_stopped && self.worker.poll_group.has(self.controller)
    }
}

/// What epoll says of an eventfd that stands for doorbells; above it, of which controller.
const DOORBELL_EVENTFD: u64 = 2;
/// What epoll says of a doorbell source; above it, of which controller.
const DOORBELL_SOURCE: u64 = 3;

fn record(trace: &mut Option<Observer>, kind: Kind, value: u32) {
    if let Some(trace) = trace {
        trace.record(kind, 0, 0, value, 0);
    }
}

/// Descriptors that are taken at once; if more are signalled, the rest is taken after the next
/// pass.
const EVENTS: usize = 64;

/// Waits for whatever wakes the worker; adds the tokens of descriptors that were signalled for a
/// controller to `signalled`, and says whether that were all.
fn wait(
    epoll: &OwnedFd,
    timeout: Option<Duration>,
    trace: &mut Option<Observer>,
    signalled: &mut Vec<u64>,
) -> bool {
    let mut events = [const { MaybeUninit::uninit() }; EVENTS];
    // An error or a signal to the process wakes us too, and takes nothing from what is signalled.
    let Ok(events) = epoll_wait(epoll, &mut events[..], timeout) else {
        return true;
    };
    for data in events.iter().map(|event| event.data.u64()) {
        if !matches!(data & 0xff, DOORBELL_EVENTFD | DOORBELL_SOURCE) {
            continue;
        }
        signalled.push(data);
        if data & 0xff == DOORBELL_EVENTFD
            && let Some(trace) = trace
        {
            trace.record(Kind::DoorbellEvent, (data >> 8) as u16, 0, 0, 0);
        }
    }
    events.len() < EVENTS
}
