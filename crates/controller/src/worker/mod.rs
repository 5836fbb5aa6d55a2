//! Workers: the threads that serve I/O queues.
//!
//! A worker owns its submission queues, the completion queues that they feed and its way to the
//! disks; nobody else touches them. It passes over all that are active as long as there is work, goes
//! on doing so for a while when there is none (the window adapts to how soon work comes back), then
//! arms every doorbell's EventIdx, passes a full fence, looks once more and sleeps in one wait on
//! everything: the bell that trapped doorbells and messages ring, and the disks. Controllers that
//! have been quiet for a while are left out of all that until they ring (see `roster`).

mod ahead;
mod doorbell_sources;
pub(crate) mod io;
mod mailbox;
pub(crate) mod message;
pub(crate) mod moderation;
mod notes;
mod pool;
pub(crate) mod queue;
mod roster;
mod tenant;
mod window;

use crate::stats::SleepStats;
use crate::trace::{Kind, TraceRing};
use doorbell_sources::DoorbellSources;
use mailbox::Mailbox;
use message::{Message, Reply, Seed};
use roster::{Roster, Seat};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use shadowbell_doorbell::{FullFence, Sleeper};
use shadowbell_spec::status::Status;
use std::io as stdio;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError, Weak};
use std::time::{Duration, Instant};
use tenant::{SleepCell, Tenant};
use window::{Next, Window};

pub use pool::{Pool, PoolOptions, Turns};
pub use window::Polling;

/// A worker with a controller whose doorbells are mapped can not be woken by them: it looks at
/// least this often. A wait is one of whole milliseconds, and a timer takes some 20 us of a processor.
const MAPPED_NAP: Duration = Duration::from_millis(1);
/// A worker on which somebody waits for something that has no bell looks this often.
const RESTLESS_NAP: Duration = Duration::from_millis(1);

/// Somebody whose admin queue has to be looked at because its doorbells are mapped.
pub(crate) trait Service: Send + Sync {
    /// Serves the admin queue, on the calling thread.
    fn service(&self);
}

/// The admin doorbells of a controller whose doorbells are mapped.
pub(crate) struct Watch {
    pub(crate) tail: shadowbell_memory::SharedU32,
    pub(crate) head: shadowbell_memory::SharedU32,
    pub(crate) seen: (u32, u32),
    pub(crate) service: Weak<dyn Service>,
}

impl Watch {
    /// Looks; whether there was something. `None` if the controller is gone.
    fn look(&mut self) -> Option<bool> {
        use std::sync::atomic::Ordering::Acquire;
        let now = (self.tail.load(Acquire), self.head.load(Acquire));
        if now == self.seen {
            return Some(false);
        }
        self.seen = now;
        self.service.upgrade()?.service();
        Some(true)
    }
}

/// The pool is gone: a worker has no more to do.
struct Stop;

struct Worker {
    mailbox: Arc<Mailbox>,
    watches: Vec<Watch>,
    sleeper: Sleeper<SleepCell, FullFence>,
    /// Its number in the pool.
    index: usize,
    roster: Roster,
    /// Hosts that it hears by itself.
    sources: DoorbellSources,
    /// What was heard, for a moment.
    rung: Vec<u64>,
    epoll: Arc<OwnedFd>,
    window: Window,
    trace: Option<TraceRing>,
    spurious_wakes: u64,
    asleep: Duration,
    started: Instant,
    /// It has slept since its last turn.
    woken: bool,
}

impl Worker {
    fn new(index: usize, mailbox: Arc<Mailbox>, polling: Polling) -> stdio::Result<Self> {
        let epoll = Arc::new(epoll::create(CreateFlags::CLOEXEC)?);
        // Edge-triggered: a signal wakes us once, and need not be read away.
        epoll::add(&epoll, &mailbox.event, EventData::new_u64(0), EventFlags::IN | EventFlags::ET)?;
        Ok(Self {
            sleeper: Sleeper::new(Arc::clone(&mailbox.state)),
            mailbox,
            index,
            roster: Roster::new(polling == Polling::Always),
            sources: DoorbellSources::default(),
            rung: Vec::new(),
            watches: Vec::new(),
            epoll,
            window: Window::new(polling),
            trace: None,
            spurious_wakes: 0,
            asleep: Duration::ZERO,
            started: Instant::now(),
            woken: false,
        })
    }

    fn run(&mut self) {
        loop {
            match self.turn() {
                Err(Stop) => return,
                Ok(true) => {
                    let Self { window, roster, .. } = self;
                    window.found(|| roster.ended());
                    continue;
                }
                Ok(false) => {}
            }
            std::hint::spin_loop();
            let Self { window, roster, .. } = self;
            match window.next(|| (roster.is_pending(), roster.ended())) {
                Next::Look => continue,
                Next::Yield => {
                    std::thread::yield_now();
                    continue;
                }
                Next::Sleep => {}
            }
            if self.roster.active.iter().any(|seat| seat.tenant.is_about_to_announce()) {
                std::thread::yield_now();
                continue;
            }
            self.sleep();
            self.window.risen();
        }
    }

    /// Messages, then a pass over the queues of all active tenants. Whether there was anything to do.
    fn turn(&mut self) -> Result<bool, Stop> {
        let mut busy = false;
        if self.roster.is_hard_of_hearing() {
            self.hear();
        }
        if self.mailbox.has_news() {
            busy = true;
            for message in self.mailbox.take() {
                if matches!(message, Message::Stop) {
                    return Err(Stop);
                }
                self.handle(message);
            }
        }
        let mut work = 0;
        for seat in &mut self.roster.active {
            work += seat.tenant.pass(&self.mailbox, &mut self.trace);
        }
        work += self.roster.tend(work, &self.mailbox, &mut self.trace);
        busy |= work != 0;
        if !self.watches.is_empty() {
            self.watches.retain_mut(|watch| match watch.look() {
                Some(news) => {
                    busy |= news;
                    true
                }
                None => false,
            });
        }
        if self.roster.active.iter().any(|seat| seat.tenant.is_detached()) {
            self.roster.remove_detached(&self.epoll);
        }
        if std::mem::take(&mut self.woken) && !busy {
            self.spurious_wakes += 1;
            record(&mut self.trace, Kind::SpuriousWake, 0);
        }
        Ok(busy)
    }

    /// Arms, looks once more, and sleeps if there is nothing. Whether it slept.
    fn sleep(&mut self) -> bool {
        self.roster.retire_to_bed(&mut self.trace);
        let mut arming = self.sleeper.prepare();
        for seat in &mut self.roster.active {
            seat.tenant.arm(&mut arming, &mut self.trace);
        }
        let mut fenced = arming.fence();
        let mut deadline: Option<Instant> = None;
        let mut nap = (!self.watches.is_empty()).then_some(MAPPED_NAP);
        for Seat { tenant, .. } in self.roster.active.iter_mut().map(|seat| &mut **seat) {
            if let Some(until) = tenant.recheck(&mut fenced, &mut self.trace) {
                deadline = Some(deadline.map_or(until, |d| d.min(until)));
            }
            if tenant.is_mapped() {
                nap = Some(MAPPED_NAP);
            }
            if tenant.is_restless() {
                nap = nap.or(Some(RESTLESS_NAP));
            }
        }
        fenced.note(self.mailbox.has_news());
        let slept = match fenced.try_sleep() {
            None => None,
            Some(asleep) => {
                record(&mut self.trace, Kind::Sleep, 0);
                let before = Instant::now();
                let left = deadline.map(|d| d.saturating_duration_since(before));
                let timeout = match (left, nap) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                };
                let all = wait(&self.epoll, timeout, &mut self.trace, &mut self.rung);
                drop(asleep);
                let slept = before.elapsed();
                self.asleep += slept;
                record(&mut self.trace, Kind::Wake, slept.as_micros().min(u32::MAX.into()) as u32);
                self.window.slept(slept);
                Some(all)
            }
        };
        let Self { roster, sleeper, .. } = self;
        roster.active.iter_mut().for_each(|seat| seat.tenant.awake(sleeper));
        if let Some(all) = slept {
            self.heard(all);
            self.woken = true;
        }
        slept.is_some()
    }

    /// Hears the descriptors that have rung for tenants while the worker was awake.
    #[cold]
    fn hear(&mut self) {
        let all = wait(&self.epoll, Some(Duration::ZERO), &mut self.trace, &mut self.rung);
        self.heard(all);
    }

    fn heard(&mut self, all: bool) {
        for token in self.rung.drain(..) {
            let controller = (token >> 8) as u32;
            self.roster.rung(controller);
            if token & 0xff == DOORBELL_SOURCE {
                self.sources.poll_doorbells(controller, self.index, &mut self.trace);
            }
        }
        self.roster.heard(all);
    }

    fn tenant(&mut self, id: u32) -> Option<&mut Tenant> {
        self.roster.activate(id)
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::CreateCq { seed, place, vector, reply } => {
                let patience = self.window.polling().patience();
                if let Some((tenant, reply)) = self.find_or_open(&seed, reply) {
                    tenant.create_cq(place, vector, patience, reply);
                }
            }
            Message::CreateSq { controller, place, cqid, reply } => match self.tenant(controller) {
                Some(tenant) => tenant.create_sq(place, cqid, reply),
                None => reply(Err(Status::CQ_INVALID.with_dnr())),
            },
            Message::DeleteSq { controller, qid, latch } => {
                if let Some(tenant) = self.tenant(controller) {
                    tenant.delete_sq(qid, latch);
                }
            }
            Message::DeleteCq { controller, qid, latch } => {
                if let Some(tenant) = self.tenant(controller) {
                    tenant.delete_cq(qid);
                }
                drop(latch);
            }
            Message::Shadow { controller, pages, latch } => {
                if let Some(tenant) = self.tenant(controller) {
                    tenant.enable_shadow(pages);
                }
                drop(latch);
            }
            Message::Table { controller, table, latches } => {
                self.roster.activate(controller);
                // One that is on its way out holds on to the old map as well.
                let tenants = self.roster.active.iter_mut().map(|seat| &mut seat.tenant);
                for tenant in tenants.filter(|t| t.id() == controller) {
                    tenant.change_table(Arc::clone(&table), latches.clone());
                }
            }
            Message::Rung { controller } => self.roster.rung(controller),
            Message::Kick { controller, event } => {
                // Edge-triggered as the bell. One that is signalled already counts as an edge.
                let flags = EventFlags::IN | EventFlags::ET;
                if self.tenant(controller).is_none() {
                    return;
                }
                let data = EventData::new_u64(KICK | u64::from(controller) << 8);
                if let Err(error) = epoll::add(&self.epoll, &event, data, flags) {
                    tracing::warn!(%error, "a worker can not wait for a controller's doorbells");
                } else if let Some(tenant) = self.tenant(controller) {
                    tenant.keep_kick(event);
                }
            }
            Message::DoorbellSource { controller, source } => {
                let Self { roster, sources, epoll, .. } = self;
                if let Some(tenant) = roster.activate(controller) {
                    let token = DOORBELL_SOURCE | u64::from(controller) << 8;
                    sources.take(source, tenant.shared(), epoll, token);
                }
            }
            Message::Flush { controller, latch } => {
                if let Some(tenant) = self.tenant(controller) {
                    tenant.flush(latch);
                }
            }
            Message::Abort { controller, sqid, cid, reply } => {
                if let Some(tenant) = self.tenant(controller) {
                    tenant.abort(sqid, cid, reply);
                }
            }
            Message::Query { controller, gather, latch } => {
                let awake = self.started.elapsed().saturating_sub(self.asleep);
                let sleep = SleepStats::of(
                    self.sleeper.stats(),
                    self.spurious_wakes,
                    awake.as_nanos().min(u64::MAX.into()) as u64,
                );
                if let Some(tenant) = self.roster.find(controller) {
                    let mut stats = tenant.snapshot();
                    let parked = self.roster.is_left_out(controller);
                    stats.sleep = SleepStats { worker: self.index, parked, ..sleep };
                    gather.lock().unwrap_or_else(PoisonError::into_inner).push(stats);
                }
                drop(latch);
            }
            Message::Detach { controller, latch } => {
                self.sources.give_back(controller);
                if let Some(tenant) = self.tenant(controller) {
                    tenant.detach(latch);
                }
            }
            Message::Watch(watch) => {
                self.watches.retain(|w| w.service.strong_count() > 0);
                self.watches.push(watch);
            }
            Message::Service(service) => {
                if let Some(service) = service.upgrade() {
                    service.service();
                }
            }
            Message::Trace(ring) => self.trace = Some(ring),
            Message::Stop => {}
        }
    }

    fn find_or_open(&mut self, seed: &Seed, reply: Reply) -> Option<(&mut Tenant, Reply)> {
        if self.tenant(seed.shared.id).is_none() {
            let opened = Tenant::new(seed).and_then(|tenant| {
                for space in tenant.spaces() {
                    let Some(fd) = space.wake_fd() else { continue };
                    let edges =
                        if space.wakes_by_edges() { EventFlags::ET } else { EventFlags::empty() };
                    let flags = EventFlags::IN | edges;
                    epoll::add(&self.epoll, fd, EventData::new_u64(1), flags)?;
                }
                Ok(tenant)
            });
            match opened {
                Ok(tenant) => {
                    let bell = seed.shared.bell(self.index).map(Arc::clone);
                    self.roster.add(tenant, bell.unwrap_or_default());
                }
                Err(error) => {
                    tracing::error!(%error, "a worker can not open a namespace's disk");
                    reply(Err(Status::INTERNAL));
                    return None;
                }
            }
        }
        self.tenant(seed.shared.id).map(|tenant| (tenant, reply))
    }
}

/// What epoll says of an eventfd that stands for doorbells; above it, of which controller.
const KICK: u64 = 2;
/// The same of an source.
const DOORBELL_SOURCE: u64 = 3;

fn record(trace: &mut Option<TraceRing>, kind: Kind, value: u32) {
    if let Some(trace) = trace {
        trace.record(kind, 0, 0, value, 0);
    }
}

/// Descriptors that are heard at once; if more have rung, the rest is heard after the next pass.
const EVENTS: usize = 64;

/// Waits for whatever wakes the worker; adds the descriptors that have rung for a controller to
/// `rung`, and says whether that were all.
fn wait(
    epoll: &OwnedFd,
    timeout: Option<Duration>,
    trace: &mut Option<TraceRing>,
    rung: &mut Vec<u64>,
) -> bool {
    let timeout = timeout.map(|t| Timespec {
        tv_sec: t.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: t.subsec_nanos().into(),
    });
    let mut events = [const { MaybeUninit::uninit() }; EVENTS];
    // An error or a signal to the process wakes us too, and takes nothing from what has rung.
    let Ok((events, rest)) = epoll::wait(epoll, &mut events[..], timeout.as_ref()) else {
        return true;
    };
    for data in events.iter().map(|event| event.data.u64()) {
        if !matches!(data & 0xff, KICK | DOORBELL_SOURCE) {
            continue;
        }
        rung.push(data);
        if data & 0xff == KICK
            && let Some(trace) = trace
        {
            trace.record(Kind::DoorbellEvent, (data >> 8) as u16, 0, 0, 0);
        }
    }
    !rest.is_empty()
}
