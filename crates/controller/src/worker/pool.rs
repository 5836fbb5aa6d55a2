//! Pool of I/O threads, and delivery of messages to them.

use super::adaptive_poll::Polling;
use super::mailbox::{Mailbox, Message};
use super::queue_move::{Arrivals, Destination};
use super::worker::{MAPPED_POLL, Worker};
use crate::control_thread::ControlThread;
use crate::interrupt::HoldLimit;
use crate::notice::LivenessCheck;
use crate::outstanding::{SampleRequest, ThreadSample};
use crate::shared::ControllerShared;
use crate::stats::SleepStats;
use crate::trace::{Kind, TraceFile, TraceRing};
use parking_lot::Mutex;
use shadowbell_memory::{AbortOnPanic, SharedU32};
use std::io;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::mpsc::Sender;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

/// I/O threads of a process, shared by all its controllers.
#[derive(Clone)]
pub struct Pool(Arc<Workers>);

struct Workers {
    /// I/O threads: first the shared ones, then the claimable ones, each of which serves a single
    /// controller.
    handles: Vec<OnceLock<Handle>>,
    /// Number of shared threads.
    shared: usize,
    polling: Polling,
    /// Claimable threads that are running but not claimed now.
    spare: Mutex<Vec<usize>>,
    /// Thread of the control planes.
    control: ControlThread,
    tracing: Tracing,
}

/// Trace and latency measurement of the pool.
#[derive(Default)]
struct Tracing {
    /// True while a trace is recorded. Checked without a lock.
    on: AtomicBool,
    /// True while command latencies are measured.
    measures: AtomicBool,
    /// Trace ring of the control plane.
    control: Mutex<Option<TraceRing>>,
    /// Trace file, which provides rings for threads that are started later.
    file: Mutex<Option<Arc<TraceFile>>>,
}

/// Number of claimable I/O threads, each of which can serve a single controller. A claimable thread
/// is started when it is claimed for the first time.
pub const CLAIMABLE: usize = 64;

/// Maximum number of shared I/O threads. The indexes of shared and claimable threads, plus 1, must
/// fit in a byte.
pub const MAX_WORKERS: usize = u8::MAX as usize - 1 - CLAIMABLE;

struct Handle {
    mailbox: Arc<Mailbox>,
    /// Number of queues on this thread. A new queue is assigned to the thread with the fewest.
    load: AtomicUsize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Handle {
    /// Starts the I/O thread `index`.
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
        outcome.recv().map_err(|_| io::Error::other("an I/O thread did not start"))??;
        Ok(Self { mailbox, load: 0.into(), thread: Mutex::new(Some(thread)) })
    }
}

/// Number of I/O threads, their polling mode and CPU affinity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolOptions {
    /// Number of I/O threads, at most [`MAX_WORKERS`]; 0 for one per two CPUs, but at least one.
    pub workers: usize,
    /// Polling mode: when threads sleep.
    pub polling: Polling,
    /// CPUs to which threads are pinned, in order. Threads beyond the list are not pinned.
    pub pin: Vec<usize>,
}

impl PoolOptions {
    /// Number of I/O threads to start: half of the CPUs by default.
    #[must_use]
    pub fn count(&self) -> usize {
        match self.workers {
            0 => std::thread::available_parallelism().map_or(1, |n| n.get() / 2).max(1),
            n => n.min(MAX_WORKERS),
        }
    }
}

impl Pool {
    /// Starts the I/O threads and the thread of the control planes.
    ///
    /// # Errors
    /// An OS error: no more threads or descriptors, or a CPU of `pin` does not exist.
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

    /// Creates a pool without threads, for programs with their own event loop and for deterministic
    /// tests. The work of its only I/O thread is done when the caller calls [`Turns::turn`]. Admin
    /// commands run on the thread that writes the admin doorbell. If a write of the admin doorbell
    /// starts a series of admin commands, the rest of the series runs in the next call of
    /// [`Turns::turn`].
    ///
    /// The caller decides when to sleep. So `polling` determines only how long interrupts are held.
    ///
    /// # Errors
    /// An OS error: no more descriptors.
    pub fn driven(polling: Polling) -> io::Result<(Self, Turns)> {
        let mailbox = Arc::new(Mailbox::new()?);
        let worker = Worker::new(0, Arc::clone(&mailbox), polling)?;
        let ours = Arc::clone(&mailbox);
        let handle = Handle { mailbox: ours, load: 0.into(), thread: Mutex::new(None) };
        let control = ControlThread::inline(move || {
            mailbox.wake();
        });
        let turns =
            Turns { worker, control: control.clone(), stopped: false, not_send: PhantomData };
        Ok((Self::of(vec![OnceLock::from(handle)], 1, polling, control), turns))
    }

    /// Number of shared I/O threads.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.shared
    }

    /// Maximum number of I/O threads, including claimable ones.
    pub(crate) fn max_workers(&self) -> usize {
        self.0.handles.len()
    }

    /// Claims an unused I/O thread for one controller. `None` if all are claimed.
    ///
    /// # Errors
    /// An OS error: no more threads or descriptors.
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
        // The lock of `spare` is held, so only this call can start the thread `index`.
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

    /// Returns a [claimed](Self::claim) thread to the pool. The thread sleeps until it is claimed
    /// again.
    pub(crate) fn release_claimed(&self, worker: usize) {
        self.0.spare.lock().push(worker);
    }

    fn handle(&self, worker: usize) -> Option<&Handle> {
        self.0.handles.get(worker).and_then(OnceLock::get)
    }

    fn shared(&self) -> impl Iterator<Item = &Handle> {
        self.0.handles[..self.0.shared].iter().filter_map(OnceLock::get)
    }

    /// Destination for queues that move to the I/O thread `worker`.
    pub(crate) fn destination(&self, worker: usize) -> Option<Destination> {
        let mailbox = Arc::clone(&self.handle(worker)?.mailbox);
        let arrivals: Arc<dyn Arrivals> = mailbox;
        Some(Destination { worker, arrivals })
    }

    /// Always false: a pool has at least one I/O thread.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.handles.is_empty()
    }

    /// Records every doorbell decision in `file` from now on. An earlier trace ends. A file can be
    /// used only once: a second call with the same file has no effect.
    pub fn trace(&self, file: &Arc<TraceFile>) {
        // While this lock is held, no thread is claimed, and no other call starts or ends a trace.
        let _spare = self.0.spare.lock();
        let Some(control) = file.control() else { return };
        *self.0.tracing.control.lock() = Some(control);
        *self.0.tracing.file.lock() = Some(Arc::clone(file));
        self.0.tracing.on.store(true, Relaxed);
        for (index, place) in self.0.handles.iter().enumerate() {
            // If `file` has no ring for a thread, the message contains `None`, and so ends an
            // earlier trace of the thread.
            if let Some(handle) = place.get() {
                handle.mailbox.send(Message::Trace(file.worker(index as u16)));
            }
        }
    }

    /// Ends the trace. A thread may still write records until it has handled the message, possibly
    /// after this method has returned.
    pub fn end_trace(&self) {
        let _spare = self.0.spare.lock();
        self.0.tracing.on.store(false, Relaxed);
        *self.0.tracing.control.lock() = None;
        *self.0.tracing.file.lock() = None;
        for handle in self.0.handles.iter().filter_map(OnceLock::get) {
            handle.mailbox.send(Message::Trace(None));
        }
    }

    /// Switches the measurement of command latencies and per-namespace counters on or off. The
    /// results are in [`Stats::measured`](crate::Stats::measured). While the measurement is on,
    /// each command costs slightly more.
    pub fn measure(&self, on: bool) {
        let _spare = self.0.spare.lock();
        if self.0.tracing.measures.swap(on, Relaxed) == on {
            return;
        }
        for handle in self.0.handles.iter().filter_map(OnceLock::get) {
            handle.mailbox.send(Message::Measure(on));
        }
    }

    /// True if [`measure`](Self::measure) is on.
    #[must_use]
    pub fn measures(&self) -> bool {
        self.0.tracing.measures.load(Relaxed)
    }

    /// Liveness check: sends a message to every shared I/O thread and to the control plane thread.
    /// The last thread to handle it calls `ended`. If a thread hangs, `ended` is never called.
    /// Threads claimed by a single controller are not checked, because its guest may delay them. In
    /// a [driven](Self::driven) pool, [`Turns::turn`] calls `ended`.
    pub fn check_liveness(&self, ended: impl FnOnce() + Send + 'static) {
        let check = LivenessCheck::new(ended);
        self.shared().for_each(|handle| {
            handle.mailbox.send(Message::LivenessCheck(check.clone()));
        });
        self.0.control.check_liveness(check);
    }

    /// Requests a sample of each running I/O thread for which `is_wanted` returns true, and returns
    /// the numbers of these threads. They answer through the channel; a blocked thread answers
    /// later. In a [driven](Self::driven) pool, [`Turns::turn`] answers.
    pub fn sample(
        &self,
        is_wanted: impl Fn(usize) -> bool,
        answer: &Sender<ThreadSample>,
    ) -> Vec<usize> {
        let handles = self.0.handles.iter().enumerate();
        let running = handles.filter_map(|(worker, place)| Some((worker, place.get()?)));
        let wanted = running.filter(|(worker, _)| is_wanted(*worker));
        let asked = wanted.map(|(worker, handle)| {
            handle.mailbox.send(Message::Sample(SampleRequest::new(answer)));
            worker
        });
        asked.collect()
    }

    /// Records a trace event of the control plane.
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

    /// Adds a queue to the I/O thread with the fewest queues. Returns the thread's index.
    pub(crate) fn assign_queue(&self) -> usize {
        let index = self.least_loaded();
        if let Some(handle) = self.handle(index) {
            handle.load.fetch_add(1, Relaxed);
        }
        index
    }

    /// Index of the I/O thread with the fewest queues.
    pub(crate) fn least_loaded(&self) -> usize {
        let loads = self.shared().map(|h| h.load.load(Relaxed)).enumerate();
        loads.min_by_key(|(_, load)| *load).map_or(0, |(index, _)| index)
    }

    /// Adds a queue to the load of this I/O thread.
    pub(crate) fn assign_queue_to(&self, worker: usize) {
        if let Some(handle) = self.handle(worker) {
            handle.load.fetch_add(1, Relaxed);
        }
    }

    /// Maximum time for which an I/O thread holds an interrupt.
    pub(crate) fn hold_limit(&self) -> HoldLimit {
        self.0.polling.hold_limit()
    }

    /// Removes one queue from the load of I/O thread `worker`.
    pub(crate) fn unassign_queue(&self, worker: usize) {
        if let Some(handle) = self.handle(worker) {
            let _ = handle.load.fetch_update(Relaxed, Relaxed, |load| load.checked_sub(1));
        }
    }

    /// Thread of the control planes.
    pub(crate) fn control(&self) -> &ControlThread {
        &self.0.control
    }

    /// Time that `worker` has been awake.
    pub(crate) fn busy(&self, worker: usize) -> Duration {
        self.handle(worker).map_or(Duration::ZERO, |handle| handle.mailbox.busy.awake())
    }

    /// Total time in nanoseconds that the I/O threads have been awake. If two values are equal, all
    /// threads have slept in between.
    #[must_use]
    pub fn activity(&self) -> u128 {
        let all = self.0.handles.iter().filter_map(OnceLock::get);
        all.map(|handle| handle.mailbox.busy.awake().as_nanos()).sum()
    }

    /// Sleep statistics of `worker`, if it exists.
    pub(crate) fn sleep_stats(&self, worker: usize) -> Option<SleepStats> {
        let mailbox = &self.handle(worker)?.mailbox;
        Some(mailbox.sleeps.read(worker, mailbox.busy.awake()))
    }

    pub(crate) fn send(&self, worker: usize, message: Message) {
        if let Some(handle) = self.handle(worker) {
            handle.mailbox.send(message);
        }
    }

    /// Delivers a trapped doorbell write to `worker`, which serves the queue. Returns true if the
    /// thread was asleep.
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

/// Work of the I/O thread of a [driven](Pool::driven) pool. The thread that created the pool
/// executes it.
///
/// Requests of the control plane to the worker (queue creation, release of memory) are also handled
/// by [`turn`](Self::turn). So the calling thread must not wait for the end of one of these
/// requests: that would be a deadlock.
pub struct Turns {
    worker: Worker,
    control: ControlThread,
    stopped: bool,
    not_send: PhantomData<*const ()>,
}

impl Turns {
    /// Handles messages, then makes one pass over every queue: fetches and executes commands, posts
    /// completions and raises interrupts. Returns true if there was work.
    pub fn turn(&mut self) -> bool {
        if self.stopped {
            return false;
        }
        let rung = self.control.poll_mapped_doorbells();
        let controlled = self.control.run_inline();
        let turn = self.worker.turn();
        self.stopped = turn.is_err();
        turn.unwrap_or(false) | rung | controlled
    }

    /// Arms the doorbells and sleeps until a doorbell write, a message or a disk completion.
    /// Returns false if it did not sleep, because there was work or the pool was dropped.
    pub fn sleep(&mut self) -> bool {
        if self.stopped || self.control.has_inline_work() {
            return false;
        }
        self.worker.sleep(self.control.has_polls().then_some(MAPPED_POLL))
    }

    /// Returns and resets the highest number of messages to the I/O thread that were waiting at
    /// once. Fuzz targets check that this number is bounded.
    #[doc(hidden)]
    pub fn max_messages(&mut self) -> usize {
        self.worker.max_messages()
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
        return Err(io::Error::other(format!(
            "cannot pin an I/O thread to CPU {cpu}: no such CPU"
        )));
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set)?;
    Ok(())
}
