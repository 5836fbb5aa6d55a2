//! I/O thread: serves I/O queues of many controllers.
//!
//! The thread passes over all active controllers as long as there is work. Without work, it polls
//! for a window, whose length it adapts to the time until work arrives. Then it arms the EventIdx
//! of every doorbell, executes a full fence, checks everything once more, and sleeps. One call of
//! `epoll_wait` waits for trapped doorbell writes, messages and disk completions. Controllers that
//! were idle for a while are excluded from passes and arming until their doorbell is written (see
//! `poll_group`).

use super::activity;
use super::adaptive_poll::{IdlePolicy, Next, Polling};
use super::controller_queues::ControllerQueues;
use super::doorbell_sources::DoorbellSources;
use super::mailbox::{Backlog, Mailbox, Message, QueueContext, Unread};
use super::observer::{self, Observer};
use super::poll_group::{PollEntry, PollGroup};
use super::queue_move::Relocated;
use super::queue_set::SleepCell;
use crate::notice::Notice;
use crate::trace::{COMPLETION_QUEUE, Kind};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use shadowbell_doorbell::{FullFence, Sleeper};
use shadowbell_memory::page_tables::Awake;
use shadowbell_memory::{EventFd, epoll_wait};
use shadowbell_spec::status::Status;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Poll interval of a sleeping I/O thread that has mapped doorbells, because their writes cannot
/// wake the thread. It is the shortest timeout of epoll; a timer for shorter ones would cost about
/// 20 us of CPU time each time.
pub(super) const MAPPED_POLL: Duration = Duration::from_millis(1);
/// Poll interval of a sleeping I/O thread while an operation is pending whose end no event signals.
const UNANNOUNCED_POLL: Duration = Duration::from_millis(1);

/// Result of a turn after which the I/O thread ends, because the pool was dropped.
pub(super) struct Stop;

pub(super) struct Worker {
    mailbox: Arc<Mailbox>,
    backlog: Backlog,
    sleeper: Sleeper<SleepCell, FullFence>,
    /// Index of the thread in the pool.
    index: usize,
    poll_group: PollGroup,
    /// Doorbell sources, from which this thread receives doorbell writes directly.
    sources: DoorbellSources,
    /// Epoll tokens of signalled descriptors that were returned by a wait and not handled yet.
    signalled: Vec<u64>,
    epoll: Arc<OwnedFd>,
    window: IdlePolicy,
    trace: Option<Observer>,
    /// True if the thread has slept since its last pass over the queues.
    woken: bool,
    /// Held while the thread is awake and may touch hosts' memory.
    awake: Option<Awake>,
}

impl Worker {
    pub(super) fn new(index: usize, mailbox: Arc<Mailbox>, polling: Polling) -> io::Result<Self> {
        let epoll = Arc::new(epoll::create(CreateFlags::CLOEXEC)?);
        // Edge-triggered: each signal wakes the thread once, and the thread need not read the
        // eventfd.
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
            window: IdlePolicy::new(polling),
            trace: None,
            woken: false,
            awake: Some(Awake::new()),
        })
    }

    pub(super) fn run(&mut self) {
        loop {
            match self.turn() {
                Err(Stop) => return,
                Ok(true) => {
                    self.found();
                    continue;
                }
                Ok(false) => {}
            }
            if !self.polls_again() {
                self.sleep(None);
                self.window.restart();
            }
        }
    }

    /// Decision after a turn without work: true if the thread polls again instead of sleeping.
    fn polls_again(&mut self) -> bool {
        std::hint::spin_loop();
        let Self { window, poll_group, .. } = self;
        let next = match window.next(|| (poll_group.is_pending(), poll_group.ended())) {
            Next::PollAgain => return true,
            Next::Yield => window.yield_cpu(),
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

    /// Records that a turn has found work.
    fn found(&mut self) {
        let Self { window, poll_group, .. } = self;
        window.found(|| poll_group.ended());
    }

    /// Handles messages, then passes over the queues of all active controllers. Returns true if
    /// there was work.
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
        work += poll_group.run_checks(work, unread, trace);
        busy |= work != 0;
        if self.poll_group.active.iter().any(|entry| entry.queues.can_be_removed()) {
            self.poll_group.remove_finished(&self.epoll, self.index);
        }
        if std::mem::take(&mut self.woken) && !busy {
            self.mailbox.sleeps.spurious_wakes.add(1);
            record(&mut self.trace, Kind::SpuriousWake, 0);
        }
        Ok(busy)
    }

    /// Arms doorbells and rechecks them. If there is no work, sleeps for at most `limit`. Returns
    /// true if it slept.
    pub(super) fn sleep(&mut self, limit: Option<Duration>) -> bool {
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
                activity::note_wake();
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

    /// Checks for descriptors that were signalled while the thread was awake.
    #[cold]
    fn check_eventfds(&mut self) {
        let all = wait(&self.epoll, Some(Duration::ZERO), &mut self.trace, &mut self.signalled);
        self.take_signalled(all);
    }

    /// Handles the signalled descriptors; `all` is true if no further descriptors are signalled.
    fn take_signalled(&mut self, all: bool) {
        for token in self.signalled.drain(..) {
            let controller = (token >> 8) as u32;
            self.poll_group.doorbell_written(controller);
            if token & 0xff == DOORBELL_SOURCE {
                let invalid = self.sources.poll_doorbells(controller, self.index, &mut self.trace);
                for (qid, error) in invalid {
                    if let Some(queues) = self.poll_group.activate(controller) {
                        queues.set.invalid(qid | COMPLETION_QUEUE, error, &mut self.trace);
                    }
                }
            }
        }
        self.poll_group.checked(all);
    }

    /// Returns and resets the highest number of messages that were waiting at once.
    pub(super) fn max_messages(&mut self) -> usize {
        self.mailbox.take_max().max(self.backlog.take_max())
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
                if let Some(queues) = self.poll_group.activate(controller) {
                    queues.change_shadow(pages, &mut self.trace);
                }
                drop(latch);
            }
            Message::Table { controller, table, latches } => {
                self.poll_group.activate(controller);
                // All queues of the controller use the map, including those that are being
                // detached.
                let active = self.poll_group.active.iter_mut().map(|entry| &mut entry.queues);
                for queues in active.filter(|queues| queues.id() == controller) {
                    queues.change_table(Arc::clone(&table), latches.clone());
                }
            }
            Message::ChangeNamespace { controller, nsid, namespaces, latch } => {
                self.poll_group.activate(controller);
                // All queues of the controller use the disk, including those that are being
                // detached.
                let Self { poll_group, epoll, .. } = self;
                let active = poll_group.active.iter_mut().map(|entry| &mut entry.queues);
                for queues in active.filter(|queues| queues.id() == controller) {
                    queues.change_namespace(nsid, &namespaces, latch.clone(), epoll);
                }
            }
            Message::ReviewAccess { controller, uuid, aborts, latch } => {
                self.poll_group.activate(controller);
                // Queues that are being detached are included, because they may have commands in
                // flight.
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
                    tracing::warn!(%error, "cannot watch the doorbell eventfd of a controller");
                } else if let Some(queues) = self.queues(controller) {
                    queues.add_eventfd(event);
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
                // A shutdown may have detached queues whose commands are still in flight.
                for queues in self.poll_group.detaching(controller) {
                    queues.detach_again(latch.clone());
                }
                if let Some(queues) = self.queues(controller) {
                    queues.detach(latch);
                }
            }
            Message::LogPending { controller } => self.poll_group.log_pending(controller),
            Message::MoveAway { controller, departure } => {
                // The destination thread will receive the host's doorbell writes.
                self.sources.remove(controller);
                if let Some(queues) = self.queues(controller) {
                    queues.start_move(departure);
                }
            }
            Message::CancelMove { controller } => {
                if let Some(queues) = self.queues(controller) {
                    queues.cancel_move();
                }
            }
            Message::Pause { controller, latch } => {
                if let Some(queues) = self.queues(controller) {
                    queues.pause(latch);
                }
            }
            Message::RunExclusive { controller, latch } => {
                if let Some(queues) = self.queues(controller) {
                    queues.grant_exclusive(latch);
                }
            }
            Message::JournalDecisions { controller, latch } => {
                if let Some(queues) = self.queues(controller) {
                    queues.journal_decisions(latch);
                }
            }
            Message::EndExclusive { controller } => {
                if let Some(queues) = self.queues(controller) {
                    queues.end_exclusive();
                }
            }
            Message::Hurry { controller } => {
                if let Some(queues) = self.queues(controller) {
                    queues.hurry();
                }
            }
            Message::MoveIn(relocated) => self.attach_moved(*relocated),
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
            Message::LivenessCheck(visit) => drop(visit),
            Message::Sample(request) => {
                request.answer(self.index, self.poll_group.outstanding().collect());
            }
            Message::Stop => {}
        }
    }

    /// Registers the disks of these queues with epoll.
    fn watch(&self, queues: &ControllerQueues) -> io::Result<()> {
        queues.namespaces().iter().try_for_each(|namespace| namespace.watch(&self.epoll))
    }

    /// Receives a controller's queues from another I/O thread.
    fn attach_moved(&mut self, relocated: Relocated) {
        let (controller, control) = (relocated.id(), relocated.control().clone());
        let watched: io::Result<()> = relocated
            .doorbell_eventfds()
            .iter()
            .try_for_each(|event| self.watch_eventfd(controller, event));
        let attached = watched.and_then(|()| {
            if let Some(queues) = self.queues(controller) {
                return Ok(queues.absorb(relocated));
            }
            let (queues, latch) = ControllerQueues::move_in(relocated, self.index)?;
            self.watch(&queues)?;
            let state = queues.shared().park_state(self.index).map(Arc::clone);
            self.poll_group.add(queues, state.unwrap_or_default());
            Ok(latch)
        });
        if let Err(error) = attached {
            tracing::error!(%error, "cannot take over queues from another I/O thread");
            control.notify(Notice::Stranded);
        }
    }

    /// Registers an eventfd that signals doorbell writes of a controller.
    fn watch_eventfd(&self, controller: u32, event: &EventFd) -> io::Result<()> {
        // Edge-triggered, like the mailbox. If the eventfd is signalled already, this counts as an
        // edge.
        let flags = EventFlags::IN | EventFlags::ET;
        let data = EventData::new_u64(DOORBELL_EVENTFD | u64::from(controller) << 8);
        Ok(epoll::add(&self.epoll, event, data, flags)?)
    }

    /// Queues of a controller on this thread. They are created if there are none yet.
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
                    tracing::error!(%error, "cannot open the disk of a namespace");
                    return None;
                }
            }
        }
        self.queues(shared.id)
    }
}

/// Epoll token of a doorbell eventfd, in the low byte; the controller is in the upper bits.
const DOORBELL_EVENTFD: u64 = 2;
/// Epoll token of a doorbell source, in the low byte; the controller is in the upper bits.
const DOORBELL_SOURCE: u64 = 3;

fn record(trace: &mut Option<Observer>, kind: Kind, value: u32) {
    if let Some(trace) = trace {
        trace.record(kind, 0, 0, value, 0);
    }
}

/// Maximum number of events per wait. Further events are taken after the next pass.
const EVENTS: usize = 64;

/// Waits for any event of the thread. Appends tokens of controllers' descriptors to `signalled`.
/// Returns true if no further descriptors are signalled.
fn wait(
    epoll: &OwnedFd,
    timeout: Option<Duration>,
    trace: &mut Option<Observer>,
    signalled: &mut Vec<u64>,
) -> bool {
    let mut events = [const { MaybeUninit::uninit() }; EVENTS];
    // Errors and process signals end the wait, too. No event is lost by that.
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
