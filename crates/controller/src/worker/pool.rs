//! The workers of a process, and who sends them what.

use super::mailbox::Mailbox;
use super::message::Message;
use super::poll_window::Polling;
use super::relocation::{Arrivals, Destination};
use super::worker::{MAPPED_POLL, Worker};
use super::worker_thread::ThreadJob;
use crate::control_thread::ControlThread;
use crate::interrupt::HoldLimit;
use crate::shared::ControllerShared;
use crate::stats::SleepStats;
use crate::trace::{Kind, TraceFile, TraceRing};
use crate::visit::Visit;
use parking_lot::Mutex;
use shadowbell_memory::{AbortOnPanic, SharedU32};
use std::io;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::{AcqRel, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// The workers of a process, shared by all its controllers.
#[derive(Clone)]
pub struct Pool(Arc<Workers>);

struct Workers {
    /// First those that all controllers share, then those that one controller each has claimed.
    handles: Vec<OnceLock<Handle>>,
    /// How many are shared.
    shared: usize,
    polling: Polling,
    /// Those of the others that were claimed and given back.
    spare: Mutex<Vec<usize>>,
    /// What the control planes run on.
    control: ControlThread,
    tracing: Tracing,
}

/// What is being recorded.
#[derive(Default)]
struct Tracing {
    /// Whether there is a trace: nobody takes a lock to see that there is none.
    on: AtomicBool,
    /// Whether commands are measured.
    measures: AtomicBool,
    /// The control plane's ring of it.
    control: Mutex<Option<TraceRing>>,
    /// For rings of workers that are claimed later.
    file: Mutex<Option<Arc<TraceFile>>>,
}

/// Workers that can be claimed: controllers that are served by a thread of their own, at most. Each
/// is started when it is claimed first.
pub const CLAIMABLE: usize = 64;

/// The most workers that controllers can share: all are counted in a byte, with those that can be
/// claimed.
pub const MAX_WORKERS: usize = u8::MAX as usize - 1 - CLAIMABLE;

struct Handle {
    mailbox: Arc<Mailbox>,
    /// Queues that it serves, for placing the next one.
    load: AtomicUsize,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The thread is lent, or about to be.
    is_lent: Arc<AtomicBool>,
}

impl Handle {
    /// Starts worker `index`.
    fn start(index: usize, pin: Option<usize>, polling: Polling) -> io::Result<Self> {
        let mailbox = Arc::new(Mailbox::new()?);
        let (started, outcome) = std::sync::mpsc::channel();
        let ours = Arc::clone(&mailbox);
        let name = format!("sb-worker{index}");
        let thread = std::thread::Builder::new().name(name).spawn(move || {
            let _guard = AbortOnPanic::new();
            let worker =
                pin.map_or(Ok(()), pin_to).and_then(|()| Worker::new(index, ours, polling));
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
        outcome.recv().map_err(|_| io::Error::other("a worker did not start"))??;
        Ok(Self {
            mailbox,
            load: 0.into(),
            thread: Mutex::new(Some(thread)),
            is_lent: Arc::default(),
        })
    }
}

/// How many workers, and how they wait.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolOptions {
    /// Threads, [`MAX_WORKERS`] at most; 0 means one for every two processors, at least one.
    pub workers: usize,
    /// When they sleep.
    pub polling: Polling,
    /// Processors to pin them to, in order; fewer than workers is allowed.
    pub pin: Vec<usize>,
}

impl PoolOptions {
    /// How many workers there are to be: half of the processors, if nothing is said.
    #[must_use]
    pub fn count(&self) -> usize {
        match self.workers {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get() / 2).max(1),
            n => n.min(MAX_WORKERS),
        }
    }
}

impl Pool {
    /// Starts the workers, and the thread of the control planes.
    ///
    /// # Errors
    /// The system's, if it has no more threads or descriptors, or no such processor to pin to.
    pub fn start(options: &PoolOptions) -> io::Result<Self> {
        let count = options.count();
        let mut handles: Vec<OnceLock<Handle>> = Vec::with_capacity(count + CLAIMABLE);
        for index in 0..count {
            let pin = options.pin.get(index).copied();
            handles.push(OnceLock::from(Handle::start(index, pin, options.polling)?));
        }
        handles.resize_with(count + CLAIMABLE, OnceLock::new);
        Ok(Self::of(handles, count, options.polling, ControlThread::start()?))
    }

    fn of(
        handles: Vec<OnceLock<Handle>>,
        shared: usize,
        polling: Polling,
        control: ControlThread,
    ) -> Self {
        let (spare, tracing) = (Mutex::default(), Tracing::default());
        Self(Arc::new(Workers { handles, shared, polling, spare, control, tracing }))
    }

    /// A pool of one worker that has no thread: the caller's turns are all that it does. Admin
    /// commands run on the thread that rings for them, and the rest of many in the next turn. For
    /// a program with a loop of its own, and for tests that decide what happens when.
    ///
    /// What `polling` says is up to the caller here, except for how long interrupts are held back.
    ///
    /// # Errors
    /// The system's, if it has no more descriptors.
    pub fn driven(polling: Polling) -> io::Result<(Self, Turns)> {
        let mailbox = Arc::new(Mailbox::new()?);
        let worker = Worker::new(0, Arc::clone(&mailbox), polling)?;
        let ours = Arc::clone(&mailbox);
        // There is no thread to be lent.
        let is_lent = Arc::new(AtomicBool::new(true));
        let handle = Handle { mailbox: ours, load: 0.into(), thread: Mutex::new(None), is_lent };
        let control = ControlThread::inline(move || {
            mailbox.wake();
        });
        let turns = Turns { worker, control: control.clone(), stopped: false, here: PhantomData };
        Ok((Self::of(vec![OnceLock::from(handle)], 1, polling, control), turns))
    }

    /// How many workers there are, apart from those that serve one controller each.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.shared
    }

    /// How many workers there can be, with those that serve one controller each.
    pub(crate) fn most(&self) -> usize {
        self.0.handles.len()
    }

    /// A worker that nobody else uses: its number, if there can be another.
    ///
    /// # Errors
    /// The system's, if it has no more threads or descriptors.
    pub(crate) fn claim(&self) -> io::Result<Option<usize>> {
        let Workers { handles, shared, polling, spare, tracing, .. } = &*self.0;
        let mut spare = spare.lock();
        if let Some(index) = spare.pop() {
            return Ok(Some(index));
        }
        let mut places = handles.iter().enumerate().skip(*shared);
        let Some((index, place)) = places.find(|(_, place)| place.get().is_none()) else {
            return Ok(None);
        };
        // Under the lock of `spare`, so nobody else starts it.
        let handle = Handle::start(index, None, *polling)?;
        let ring = tracing.file.lock().as_ref().and_then(|file| file.worker(index as u16));
        if let Some(ring) = ring {
            handle.mailbox.send(Message::Trace(Some(ring)));
        }
        if tracing.measures.load(Relaxed) {
            handle.mailbox.send(Message::Measure(true));
        }
        let _ = place.set(handle);
        Ok(Some(index))
    }

    /// A worker that was [claimed](Self::claim) is not needed any more. It sleeps until another
    /// controller needs one.
    pub(crate) fn give_back(&self, worker: usize) {
        self.0.spare.lock().push(worker);
    }

    /// Has `job` of a controller run on the thread of `worker`, unless that is lent to another.
    pub(crate) fn lend(
        &self,
        controller: u32,
        worker: usize,
        job: ThreadJob,
    ) -> Result<(), ThreadJob> {
        let Some(handle) = self.handle(worker) else { return Err(job) };
        if handle.is_lent.swap(true, AcqRel) {
            return Err(job);
        }
        let is_lent = Arc::clone(&handle.is_lent);
        let job: ThreadJob = Box::new(move |thread| {
            job(thread);
            is_lent.store(false, Release);
        });
        handle.mailbox.send(Message::Run { controller, job });
        Ok(())
    }

    fn handle(&self, worker: usize) -> Option<&Handle> {
        self.0.handles.get(worker).and_then(OnceLock::get)
    }

    fn shared(&self) -> impl Iterator<Item = &Handle> {
        self.0.handles[..self.0.shared].iter().filter_map(OnceLock::get)
    }

    /// Where a controller can go.
    pub(crate) fn destination(&self, worker: usize) -> Option<Destination> {
        let mailbox = Arc::clone(&self.handle(worker)?.mailbox);
        let arrivals: Arc<dyn Arrivals> = mailbox;
        Some(Destination { worker, arrivals })
    }

    /// Never: a pool has at least one worker.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.handles.is_empty()
    }

    /// Records every doorbell decision in `file` from now on, and in no other one any more. A file
    /// that was recorded in before has no rings left for another time: nothing changes.
    pub fn trace(&self, file: &Arc<TraceFile>) {
        // Nobody claims a worker meanwhile, and nobody else begins or ends a trace.
        let _spare = self.0.spare.lock();
        let Some(control) = file.control() else { return };
        *self.0.tracing.control.lock() = Some(control);
        *self.0.tracing.file.lock() = Some(Arc::clone(file));
        self.0.tracing.on.store(true, Relaxed);
        for (index, place) in self.0.handles.iter().enumerate() {
            // A worker without a ring of this file must not go on in the one before.
            if let Some(handle) = place.get() {
                handle.mailbox.send(Message::Trace(file.worker(index as u16)));
            }
        }
    }

    /// Records nothing more. The file has what was recorded; what a worker does just now may still
    /// come.
    pub fn end_trace(&self) {
        let _spare = self.0.spare.lock();
        self.0.tracing.on.store(false, Relaxed);
        *self.0.tracing.control.lock() = None;
        *self.0.tracing.file.lock() = None;
        for handle in self.0.handles.iter().filter_map(OnceLock::get) {
            handle.mailbox.send(Message::Trace(None));
        }
    }

    /// Measures how long commands take from now on, and counts them by namespace, or does so no
    /// more; [`Stats::measured`](crate::Stats::measured) has it. It costs each command a little,
    /// and nothing while it is off.
    pub fn measure(&self, on: bool) {
        let _spare = self.0.spare.lock();
        if self.0.tracing.measures.swap(on, Relaxed) == on {
            return;
        }
        for handle in self.0.handles.iter().filter_map(OnceLock::get) {
            handle.mailbox.send(Message::Measure(on));
        }
    }

    /// Whether [`measure`](Self::measure) is on.
    #[must_use]
    pub fn measures(&self) -> bool {
        self.0.tracing.measures.load(Relaxed)
    }

    /// Visits each worker that controllers share, and the thread of the control planes: `ended`
    /// runs when all of them have come to it, on the thread of the last. One that hangs never
    /// does. A worker that serves one controller alone is not visited: that one's guest may hold
    /// it up. Of a pool without threads, `ended` waits for [`Turns::turn`].
    pub fn visit(&self, ended: impl FnOnce() + Send + 'static) {
        let visit = Visit::new(ended);
        self.shared().for_each(|handle| {
            handle.mailbox.send(Message::Visit(visit.clone()));
        });
        self.0.control.visit(visit);
    }

    /// Records something that the control plane did.
    pub(crate) fn trace_control(
        &self,
        kind: Kind,
        controller: u32,
        qid: u16,
        value: u32,
        extra: u32,
    ) {
        let tracing = &self.0.tracing;
        if tracing.on.load(Relaxed)
            && let Some(trace) = &mut *tracing.control.lock()
        {
            trace.record(kind, controller as u16, qid, value, extra);
        }
    }

    /// The worker with the fewest queues takes another.
    pub(crate) fn place(&self) -> usize {
        let index = self.least_loaded();
        if let Some(handle) = self.handle(index) {
            handle.load.fetch_add(1, Relaxed);
        }
        index
    }

    /// The worker that has the fewest queues.
    pub(crate) fn least_loaded(&self) -> usize {
        let loads = self.shared().map(|h| h.load.load(Relaxed)).enumerate();
        loads.min_by_key(|(_, load)| *load).map_or(0, |(index, _)| index)
    }

    /// As [`place`](Self::place), at this worker.
    pub(crate) fn place_at(&self, worker: usize) {
        if let Some(handle) = self.handle(worker) {
            handle.load.fetch_add(1, Relaxed);
        }
    }

    /// How long interrupts may be held back by a worker.
    pub(crate) fn hold_limit(&self) -> HoldLimit {
        self.0.polling.hold_limit()
    }

    /// A queue that [`place`](Self::place) put on `worker` is gone.
    pub(crate) fn unplace(&self, worker: usize) {
        if let Some(handle) = self.handle(worker) {
            let _ = handle.load.fetch_update(Relaxed, Relaxed, |load| load.checked_sub(1));
        }
    }

    /// What the control planes run on.
    pub(crate) fn control(&self) -> &ControlThread {
        &self.0.control
    }

    /// How long `worker` has been awake.
    pub(crate) fn busy(&self, worker: usize) -> Duration {
        self.handle(worker).map_or(Duration::ZERO, |handle| handle.mailbox.busy.awake())
    }

    /// How `worker` sleeps, if there is one.
    pub(crate) fn sleep_stats(&self, worker: usize) -> Option<SleepStats> {
        let mailbox = &self.handle(worker)?.mailbox;
        Some(mailbox.sleeps.read(worker, mailbox.busy.awake()))
    }

    pub(crate) fn send(&self, worker: usize, message: Message) {
        if let Some(handle) = self.handle(worker) {
            handle.mailbox.send(message);
        }
    }

    /// A trapped write of a doorbell of a queue that `worker` serves. Whether this has woken it.
    pub(crate) fn write_doorbell(
        &self,
        worker: usize,
        shared: &ControllerShared,
        register: &SharedU32,
        value: u32,
    ) -> bool {
        if let Some(handle) = self.handle(worker)
            && let Some(state) = shared.park_state(worker)
        {
            return handle.mailbox.write_doorbell(shared.id, state, register, value);
        }
        false
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.control.stop();
        for handle in self.handles.iter().filter_map(OnceLock::get) {
            handle.mailbox.send(Message::Stop);
        }
        for handle in self.handles.iter().filter_map(OnceLock::get) {
            if let Some(thread) = handle.thread.lock().take()
                && thread.thread().id() != std::thread::current().id()
            {
                let _ = thread.join();
            }
        }
    }
}

/// The worker of [`Pool::driven`], in the hands of the thread that made it.
///
/// What the control plane asks of a worker (to create a queue, to let go of memory) happens in a
/// turn as well: whoever waits for such a thing on the same thread waits for ever.
pub struct Turns {
    worker: Worker,
    control: ControlThread,
    stopped: bool,
    here: PhantomData<*const ()>,
}

impl Turns {
    /// Takes messages, then passes once over every queue: fetches, executes, posts, interrupts.
    /// Whether there was anything to do.
    pub fn turn(&mut self) -> bool {
        if self.stopped {
            return false;
        }
        let rung = self.control.look_at_doorbells();
        let controlled = self.control.run_inline();
        let turn = self.worker.turn();
        self.stopped = turn.is_err();
        turn.unwrap_or(false) | rung | controlled
    }

    /// Arms the doorbells and sleeps until one rings, a message comes, or a disk is done. Whether
    /// it slept; not if there turned out to be something to do, or if the pool is gone.
    pub fn sleep(&mut self) -> bool {
        if self.stopped || self.control.has_inline_work() {
            return false;
        }
        self.worker.sleep(self.control.has_polls().then_some(MAPPED_POLL))
    }

    /// The most messages of control planes that have waited for the worker at a time, since this
    /// was last asked. For the fuzz targets of this workspace, which bound it.
    #[doc(hidden)]
    pub fn most_messages(&mut self) -> usize {
        self.worker.most_messages()
    }
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Turns").field("stopped", &self.stopped).finish_non_exhaustive()
    }
}

fn pin_to(cpu: usize) -> io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    if cpu >= rustix::thread::CpuSet::MAX_CPU {
        return Err(io::Error::other(format!("there is no processor {cpu} to pin to")));
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)?;
    Ok(())
}
