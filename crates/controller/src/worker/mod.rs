//! Workers: the threads that serve I/O queues.
//!
//! A worker owns its submission queues, the completion queues that they feed and its way to the
//! disks; nobody else touches them. It passes over all of them as long as there is work, goes on
//! doing so for a while when there is none (the window adapts to how soon work comes back), then
//! arms every doorbell's EventIdx, passes a full fence, looks once more and sleeps in one wait on
//! everything: the bell that trapped doorbells and messages ring, and the disks.

pub(crate) mod io;
mod mailbox;
pub(crate) mod message;
pub(crate) mod queue;
mod tenant;

use crate::stats::SleepStats;
use crate::trace::{Kind, TraceFile, TraceRing};
use doorbell::{FullFence, Sleeper};
use mailbox::Mailbox;
use message::{Message, Reply, Seed};
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use spec::status::Status;
use std::io as stdio;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tenant::{SleepCell, Tenant};

/// When a worker that has found nothing to do goes to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// After a window that grows while work returns soon after it went to sleep and shrinks while
    /// it does not, up to this long.
    Adaptive(Duration),
    /// Never: a processor per worker, and no doorbell ever rings.
    Always,
    /// At once.
    Never,
}

impl Default for Polling {
    fn default() -> Self {
        Self::Adaptive(Duration::from_micros(100))
    }
}

/// Idle passes between two looks at the clock.
const PASSES: u32 = 64;
/// Idle passes after which a worker gives way to others while it polls: some microseconds, in which
/// a host that polls as well would have answered.
const POLITE_AFTER: u32 = 8 * PASSES;
/// The first window after a sleep that was worth spinning for.
const FIRST_WINDOW: Duration = Duration::from_micros(8);
/// A worker with a controller whose doorbells are mapped can not be woken by them: it looks at
/// least this often.
const MAPPED_NAP: Duration = Duration::from_micros(250);
/// A worker on which somebody waits for something that has no bell looks this often.
const RESTLESS_NAP: Duration = Duration::from_millis(1);

/// The workers of a process, shared by all its controllers.
#[derive(Clone)]
pub struct Pool(Arc<Workers>);

struct Workers {
    handles: Vec<Handle>,
    /// The control plane's ring of the trace file, if there is one.
    control_trace: OnceLock<Mutex<TraceRing>>,
}

struct Handle {
    mailbox: Arc<Mailbox>,
    /// Queues that it serves, for placing the next one.
    load: std::sync::atomic::AtomicUsize,
    thread: Option<JoinHandle<()>>,
}

/// How many workers, and how they wait.
#[derive(Clone, Debug, Default)]
pub struct PoolOptions {
    /// Threads; 0 means one for every two processors, at least one.
    pub workers: usize,
    /// When they sleep.
    pub polling: Polling,
    /// Processors to pin them to, in order; fewer than workers is allowed.
    pub pin: Vec<usize>,
}

impl Pool {
    /// Starts the workers.
    ///
    /// # Errors
    /// The system's, if it has no more threads or descriptors, or no such processor to pin to.
    pub fn start(options: &PoolOptions) -> stdio::Result<Self> {
        let count = match options.workers {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get() / 2).max(1),
            n => n.min(usize::from(u8::MAX) - 1),
        };
        let mut handles = Vec::with_capacity(count);
        for index in 0..count {
            let mailbox = Arc::new(Mailbox::new()?);
            let (pin, polling) = (options.pin.get(index).copied(), options.polling);
            let (started, outcome) = std::sync::mpsc::channel();
            let bell = Arc::clone(&mailbox);
            let thread =
                std::thread::Builder::new().name(format!("sb-worker{index}")).spawn(move || {
                    let worker =
                        pin.map_or(Ok(()), pin_to).and_then(|()| Worker::new(bell, polling));
                    match worker {
                        Ok(mut worker) => {
                            let _ = started.send(Ok(()));
                            worker.run();
                        }
                        Err(error) => {
                            let _ = started.send(Err(error));
                        }
                    }
                })?;
            handles.push(Handle { mailbox, load: 0.into(), thread: Some(thread) });
            outcome.recv().map_err(|_| stdio::Error::other("a worker did not start"))??;
        }
        Ok(Self(Arc::new(Workers { handles, control_trace: OnceLock::new() })))
    }

    /// How many workers there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.handles.len()
    }

    /// Never: a pool has at least one worker.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.handles.is_empty()
    }

    /// Records every doorbell decision in `file` from now on. Once in the life of a pool; a second
    /// call changes nothing.
    pub fn trace(&self, file: &TraceFile) {
        let Some(control) = file.control() else { return };
        if self.0.control_trace.set(Mutex::new(control)).is_ok() {
            for (handle, ring) in self.0.handles.iter().zip(file.workers()) {
                handle.mailbox.send(Message::Trace(ring));
            }
        }
    }

    /// Records something that the control plane did.
    pub(crate) fn note(&self, kind: Kind, controller: u32, qid: u16, value: u32, extra: u32) {
        if let Some(trace) = self.0.control_trace.get() {
            let mut trace = trace.lock().unwrap_or_else(PoisonError::into_inner);
            trace.record(kind, controller as u16, qid, value, extra);
        }
    }

    /// The worker with the fewest queues takes another.
    pub(crate) fn place(&self) -> usize {
        use std::sync::atomic::Ordering::Relaxed;
        let loads = self.0.handles.iter().map(|h| h.load.load(Relaxed)).enumerate();
        let index = loads.min_by_key(|(_, load)| *load).map_or(0, |(index, _)| index);
        self.0.handles[index].load.fetch_add(1, Relaxed);
        index
    }

    /// A queue that [`place`](Self::place) put on `worker` is gone.
    pub(crate) fn unplace(&self, worker: usize) {
        use std::sync::atomic::Ordering::Relaxed;
        if let Some(handle) = self.0.handles.get(worker) {
            let _ = handle.load.fetch_update(Relaxed, Relaxed, |load| load.checked_sub(1));
        }
    }

    pub(crate) fn send(&self, worker: usize, message: Message) {
        if let Some(handle) = self.0.handles.get(worker) {
            handle.mailbox.send(message);
        }
    }

    pub(crate) fn ring(&self, worker: usize, register: &memory::SharedU32, value: u32) {
        if let Some(handle) = self.0.handles.get(worker) {
            handle.mailbox.ring(register, value);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for handle in &self.handles {
            handle.mailbox.send(Message::Stop);
        }
        for handle in &mut self.handles {
            if let Some(thread) = handle.thread.take()
                && thread.thread().id() != std::thread::current().id()
            {
                let _ = thread.join();
            }
        }
    }
}

fn pin_to(cpu: usize) -> stdio::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(stdio::Error::other(format!("there is no processor {cpu} to pin to")));
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)?;
    Ok(())
}

/// Somebody whose admin queue has to be looked at because its doorbells are mapped.
pub(crate) trait Service: Send + Sync {
    /// Serves the admin queue, on the calling thread.
    fn service(&self);
}

/// The admin doorbells of a controller whose doorbells are mapped.
pub(crate) struct Watch {
    pub(crate) tail: memory::SharedU32,
    pub(crate) head: memory::SharedU32,
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

struct Worker {
    mailbox: Arc<Mailbox>,
    watches: Vec<Watch>,
    sleeper: Sleeper<SleepCell, FullFence>,
    tenants: Vec<Tenant>,
    epoll: OwnedFd,
    polling: Polling,
    window: Duration,
    trace: Option<TraceRing>,
    spurious_wakes: u64,
    asleep: Duration,
    started: Instant,
}

impl Worker {
    fn new(mailbox: Arc<Mailbox>, polling: Polling) -> stdio::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        // Edge-triggered: a signal wakes us once, and need not be read away.
        epoll::add(&epoll, &mailbox.event, EventData::new_u64(0), EventFlags::IN | EventFlags::ET)?;
        Ok(Self {
            sleeper: Sleeper::new(Arc::clone(&mailbox.state)),
            mailbox,
            tenants: Vec::new(),
            watches: Vec::new(),
            epoll,
            polling,
            window: Duration::ZERO,
            trace: None,
            spurious_wakes: 0,
            asleep: Duration::ZERO,
            started: Instant::now(),
        })
    }

    fn run(&mut self) {
        let mut idle = 0u32;
        let mut idle_since = Instant::now();
        let mut woken = false;
        loop {
            let mut busy = false;
            if self.mailbox.has_news() {
                busy = true;
                for message in self.mailbox.take() {
                    if matches!(message, Message::Stop) {
                        return;
                    }
                    self.handle(message);
                }
            }
            for tenant in &mut self.tenants {
                busy |= tenant.pass(&self.mailbox, &mut self.trace);
            }
            if !self.watches.is_empty() {
                self.watches.retain_mut(|watch| match watch.look() {
                    Some(news) => {
                        busy |= news;
                        true
                    }
                    None => false,
                });
            }
            if self.tenants.iter().any(Tenant::is_detached) {
                self.remove_detached();
            }
            if std::mem::take(&mut woken) && !busy {
                self.spurious_wakes += 1;
                record(&mut self.trace, Kind::SpuriousWake, 0);
            }
            if busy {
                idle = 0;
                continue;
            }
            std::hint::spin_loop();
            idle += 1;
            let window = match self.polling {
                Polling::Always => continue,
                Polling::Never => Duration::ZERO,
                Polling::Adaptive(_) => self.window,
            };
            if !window.is_zero() {
                if !idle.is_multiple_of(PASSES) {
                    continue;
                }
                let now = Instant::now();
                if idle == PASSES {
                    idle_since = now;
                }
                if now.duration_since(idle_since) < window {
                    if idle >= POLITE_AFTER {
                        // Whoever else wants this processor goes first: on a small host that is the
                        // VMM's thread with the interrupt that the next command waits for.
                        std::thread::yield_now();
                    }
                    continue;
                }
            }
            idle = 0;
            woken = self.sleep();
        }
    }

    /// Arms, looks once more, and sleeps if there is nothing. Whether it slept.
    fn sleep(&mut self) -> bool {
        let mut arming = self.sleeper.prepare();
        for tenant in &mut self.tenants {
            tenant.arm(&mut arming, &mut self.trace);
        }
        let mut fenced = arming.fence();
        let mut deadline: Option<Instant> = None;
        let mut nap = (!self.watches.is_empty()).then_some(MAPPED_NAP);
        for tenant in &mut self.tenants {
            if let Some(until) = tenant.recheck(&mut fenced, &mut self.trace) {
                deadline = Some(deadline.map_or(until, |d| d.min(until)));
            }
            if tenant.is_restless() {
                nap = nap.or(Some(RESTLESS_NAP));
            }
        }
        fenced.note(self.mailbox.has_news());
        let slept = match fenced.settle() {
            None => false,
            Some(asleep) => {
                record(&mut self.trace, Kind::Sleep, 0);
                let before = Instant::now();
                let left = deadline.map(|d| d.saturating_duration_since(before));
                let timeout = match (left, nap) {
                    (Some(a), Some(b)) => Some(a.min(b)),
                    (a, b) => a.or(b),
                };
                wait(&self.epoll, timeout);
                drop(asleep);
                let slept = before.elapsed();
                self.asleep += slept;
                record(&mut self.trace, Kind::Wake, slept.as_micros().min(u32::MAX.into()) as u32);
                if let Polling::Adaptive(most) = self.polling {
                    self.window = adapt(self.window, slept, most);
                }
                true
            }
        };
        let Self { tenants, sleeper, .. } = self;
        tenants.iter_mut().for_each(|tenant| tenant.awake(sleeper));
        slept
    }

    fn remove_detached(&mut self) {
        for index in (0..self.tenants.len()).rev() {
            if self.tenants[index].is_detached() {
                let mut tenant = self.tenants.swap_remove(index);
                for fd in tenant.spaces().iter().filter_map(io::Space::wake_fd) {
                    let _ = epoll::delete(&self.epoll, fd);
                }
                tenant.retire();
                // Dropping it lets its latch go: from here on nothing touches the host's memory.
                drop(tenant);
            }
        }
    }

    fn tenant(&mut self, id: u32) -> Option<&mut Tenant> {
        // The newest: an old one of the same controller may still be on its way out.
        self.tenants.iter_mut().rev().find(|t| t.id() == id && !t.is_leaving())
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::CreateCq { seed, place, vector, reply } => {
                if let Some((tenant, reply)) = self.find_or_open(&seed, reply) {
                    tenant.create_cq(place, vector, reply);
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
            Message::Table { controller, table, latch } => {
                // One that is on its way out holds on to the old map as well.
                for tenant in self.tenants.iter_mut().filter(|t| t.id() == controller) {
                    tenant.change_table(Arc::clone(&table), latch.clone());
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
                if let Some(tenant) = self.tenant(controller) {
                    let mut stats = tenant.snapshot();
                    stats.sleep = sleep;
                    gather.lock().unwrap_or_else(PoisonError::into_inner).push(stats);
                }
                drop(latch);
            }
            Message::Detach { controller, latch } => {
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
                for fd in tenant.spaces().iter().filter_map(io::Space::wake_fd) {
                    epoll::add(&self.epoll, fd, EventData::new_u64(1), EventFlags::IN)?;
                }
                Ok(tenant)
            });
            match opened {
                Ok(tenant) => self.tenants.push(tenant),
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

fn record(trace: &mut Option<TraceRing>, kind: Kind, value: u32) {
    if let Some(trace) = trace {
        trace.record(kind, 0, 0, value, 0);
    }
}

/// The next window, after a sleep of `slept`. As KVM's haltpoll does it: grow when spinning a bit
/// longer would have saved the sleep, shrink when it would have been in vain.
fn adapt(window: Duration, slept: Duration, most: Duration) -> Duration {
    if slept < most {
        (window * 2).max(FIRST_WINDOW).min(most)
    } else if window <= FIRST_WINDOW {
        Duration::ZERO
    } else {
        window / 2
    }
}

fn wait(epoll: &OwnedFd, timeout: Option<Duration>) {
    let timeout = timeout.map(|t| Timespec {
        tv_sec: t.as_secs().min(i64::MAX as u64) as i64,
        tv_nsec: t.subsec_nanos().into(),
    });
    let mut events = [const { MaybeUninit::uninit() }; 8];
    // Whatever wakes us, an error or a signal to the process too, the next pass looks everywhere.
    let _ = epoll::wait(epoll, &mut events[..], timeout.as_ref());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_follows_the_load() {
        let most = Duration::from_micros(100);
        let mut window = Duration::ZERO;
        for _ in 0..10 {
            window = adapt(window, Duration::from_micros(20), most);
        }
        assert_eq!(window, most);
        for _ in 0..10 {
            window = adapt(window, Duration::from_secs(1), most);
        }
        assert_eq!(window, Duration::ZERO);
    }
}
