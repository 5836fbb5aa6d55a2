//! Requests in flight on one queue of the disk, with the buffers that they use.
//!
//! A queue, its requests and its buffers belong to one thread. A request occupies a slot, whose
//! number is its tag. While the disk has the request, the slot owns the data buffer and the lock of
//! the range. So both remain if the future is dropped.
//!
//! # Wakeups
//!
//! No timer repairs a lost wakeup: a thread with requests in flight sleeps until the disk wakes it,
//! or until a request exceeds its timeout. No wakeup is lost, because
//!
//! * a thread sleeps only after a [turn](Engine::turn) without completions that followed its last
//!   submission ([`Engine::may_sleep`]). So the disk has all requests;
//! * if [`Queue::reap`] starts further requests, they are in flight when `reap` returns;
//! * a completion that `reap` does not return makes the wake descriptor readable, by an event after
//!   the start of that `reap`, so the descriptor may be edge-triggered.
//!
//! The model in `crates/export/src/io_thread/model.rs` executes this code with every order of
//! requests and completions. For each of these rules, a variant of the code that violates it must
//! lose a wakeup in the model.

use crate::buffers::Buffer;
use crate::locks::RangeGuard;
use crate::threads::leave;
use crate::traffic::QueueTraffic;
use shadowbell_disk::{
    DiskError, DiskInfo, Metadata, MetadataFormat, Op, Queue, Request, Submitted,
};
use shadowbell_memory::Segments;
use shadowbell_spec::nvm::{PRINFO_GUARD, PRINFO_PRACT, PRINFO_REFTAG};
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

/// Number of [turns](Engine::turn) between two timeout checks, while requests are in flight.
const TURNS: u32 = 1 << 14;
/// Interval of completion checks during the drop of a queue.
const PAUSE: Duration = Duration::from_millis(1);
/// Time in which the disk should complete a request after the request was cancelled.
const CANCELLED: Duration = Duration::from_secs(5);

/// Data of a request.
pub(crate) enum Data {
    /// A buffer of this process.
    Buffer(Buffer),
    /// Memory that the caller describes by segments; empty for requests without data.
    Segments(Segments),
}

impl Data {
    pub(crate) const NONE: Self = Self::Segments(Segments::new());

    fn segments(&mut self) -> Option<&mut Segments> {
        match self {
            Self::Buffer(buffer) => buffer.segments(),
            Self::Segments(segments) => Some(segments),
        }
    }
}

/// Request in flight: its data, and the lock of the range that it writes.
struct InFlight {
    data: Data,
    guard: Option<Arc<RangeGuard>>,
    /// Time of the submission, in seconds since the start of the engine.
    since: u32,
}

impl InFlight {
    /// State of the request after its client got an error or was disconnected. The disk may still
    /// execute a write later, so later writes of its range wait for its end.
    fn abandoned(self) -> State {
        if let Some(guard) = &self.guard {
            guard.make_exclusive();
        }
        State::Abandoned(self)
    }
}

#[derive(Default)]
enum State {
    #[default]
    Free,
    /// The disk has the request, and a future waits for the result.
    Pending(InFlight),
    /// The disk has the request, which has timed out. The future has not taken the error yet.
    Late(InFlight),
    /// The disk has the request, and no future waits for it.
    Abandoned(InFlight),
    /// The request has ended. The future has not taken the result yet.
    Done(Result<(), DiskError>, InFlight),
}

#[derive(Default)]
struct Slot {
    state: State,
    waker: Option<Waker>,
}

/// Result of a request that has ended.
pub(crate) struct Ended {
    pub(crate) outcome: Result<(), DiskError>,
    /// Data of the request. `None` if the request has timed out: the disk may still access the
    /// data.
    pub(crate) data: Option<Data>,
    /// Lock of the written range. A retry of the request passes it to `submit` again.
    pub(crate) guard: Option<Arc<RangeGuard>>,
}

/// Result of a submission.
pub(crate) enum Begun {
    Done(Ended),
    /// The request is in flight in this slot.
    Slot(u32),
}

struct Core {
    queue: Box<dyn Queue>,
    /// Block size and metadata format, if blocks have protection information.
    protection: Option<(u64, MetadataFormat)>,
    schedules_sources: bool,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Number of requests that the disk has.
    pending: usize,
    reaped: Vec<(u32, Result<(), DiskError>, Segments)>,
    /// Lists that each [turn](Engine::turn) fills and empties. The fields preserve their
    /// allocations from turn to turn.
    wakers: Vec<Waker>,
    ended: Vec<InFlight>,
    turns: u32,
    /// Time of the last reading of the clock, in seconds since the start.
    now: u32,
    started: Instant,
    /// Longest time of a request, in seconds.
    timeout: u32,
    /// Time of the next timeout check, in seconds since the start. No request can exceed its
    /// timeout earlier.
    due: u32,
    /// True if the timeout also applies to requests that the disk holds after an error of its
    /// storage.
    is_ending: bool,
    traffic: Arc<QueueTraffic>,
}

/// One queue of the disk, with its requests.
pub(crate) struct Engine {
    /// `None` only while the value is dropped.
    core: RefCell<Option<Core>>,
    pending: Cell<usize>,
    /// True if the queue must be checked for completions even if no request is in flight.
    must_look: Cell<bool>,
    /// True if requests were submitted since the last call of [`turn`](Self::turn).
    uncommitted: Cell<bool>,
}

impl Engine {
    pub(crate) fn new(
        queue: Box<dyn Queue>,
        info: &DiskInfo,
        timeout: Duration,
        traffic: Arc<QueueTraffic>,
    ) -> Self {
        let protected = info.metadata.filter(|format| format.protection != 0);
        let core = Core {
            protection: protected.map(|format| (info.block_size.into(), format)),
            schedules_sources: queue.schedules_sources(),
            queue,
            slots: Vec::new(),
            free: Vec::new(),
            pending: 0,
            reaped: Vec::new(),
            wakers: Vec::new(),
            ended: Vec::new(),
            turns: 0,
            now: 0,
            started: Instant::now(),
            timeout: u32::try_from(timeout.as_secs()).unwrap_or(u32::MAX),
            due: u32::MAX,
            is_ending: false,
            traffic,
        };
        Self {
            core: RefCell::new(Some(core)),
            pending: Cell::new(0),
            must_look: Cell::new(false),
            uncommitted: Cell::new(false),
        }
    }

    /// Calls `with` with the disk's queue.
    pub(crate) fn with_queue<R>(&self, with: impl FnOnce(&dyn Queue) -> R) -> Option<R> {
        Some(with(&*self.core.borrow().as_ref()?.queue))
    }

    pub(crate) fn with_queue_mut(&self, with: impl FnOnce(&mut dyn Queue)) {
        if let Some(core) = self.core.borrow_mut().as_mut() {
            with(&mut *core.queue);
        }
    }

    /// Number of requests in flight.
    pub(crate) fn pending(&self) -> usize {
        self.pending.get()
    }

    /// Submits a request. A later [`turn`](Self::turn) commits it.
    pub(crate) fn submit(
        &self,
        request: &Request,
        mut data: Data,
        guard: Option<Arc<RangeGuard>>,
        waker: &Waker,
    ) -> Begun {
        let mut core = self.core.borrow_mut();
        let ended = |outcome, data, guard| Begun::Done(Ended { outcome, data: Some(data), guard });
        let Some(core) = core.as_mut() else {
            return ended(Err(DiskError::BadBuffer), data, guard);
        };
        let tag = core.free.pop().unwrap_or_else(|| {
            core.slots.push(Slot::default());
            (core.slots.len() - 1) as u32
        });
        let Some(segments) = data.segments() else {
            core.free.push(tag);
            return ended(Err(DiskError::BadBuffer), data, guard);
        };
        core.traffic.count(request);
        match submit(&mut *core.queue, core.protection.as_ref(), tag, request, segments) {
            Submitted::Done(outcome) => {
                core.traffic.count_end(outcome);
                core.free.push(tag);
                ended(outcome, data, guard)
            }
            Submitted::Pending => {
                if core.pending == 0 {
                    core.read_clock();
                    core.due = late(core.now, core.timeout);
                }
                core.pending += 1;
                self.pending.set(core.pending);
                self.uncommitted.set(true);
                let since = core.now;
                if let Some(slot) = core.slots.get_mut(tag as usize) {
                    slot.state = State::Pending(InFlight { data, guard, since });
                    slot.waker = Some(waker.clone());
                }
                Begun::Slot(tag)
            }
        }
    }

    /// Takes the result of the request in slot `tag`. Returns `None` if the request is in flight;
    /// then `waker` is woken at its end.
    pub(crate) fn poll(&self, tag: u32, waker: &Waker) -> Option<Ended> {
        let mut core = self.core.borrow_mut();
        let core = core.as_mut()?;
        let slot = core.slots.get_mut(tag as usize)?;
        match std::mem::take(&mut slot.state) {
            State::Done(outcome, InFlight { data, guard, .. }) => {
                core.free.push(tag);
                Some(Ended { outcome, data: Some(data), guard })
            }
            State::Late(in_flight) => {
                slot.state = in_flight.abandoned();
                Some(Ended { outcome: Err(DiskError::Cancelled), data: None, guard: None })
            }
            state => {
                slot.state = state;
                if !slot.waker.as_ref().is_some_and(|known| known.will_wake(waker)) {
                    slot.waker = Some(waker.clone());
                }
                None
            }
        }
    }

    /// Abandons the request in slot `tag`: its data and its lock are released when it completes.
    pub(crate) fn abandon(&self, tag: u32) {
        let mut core = self.core.borrow_mut();
        let Some(all) = core.as_mut() else { return };
        let Some(slot) = all.slots.get_mut(tag as usize) else { return };
        slot.waker = None;
        let ended = match std::mem::take(&mut slot.state) {
            State::Pending(in_flight) | State::Late(in_flight) => {
                slot.state = in_flight.abandoned();
                return;
            }
            State::Done(_, in_flight) => in_flight,
            state => {
                slot.state = state;
                return;
            }
        };
        all.free.push(tag);
        drop(core);
        drop(ended);
    }

    /// Commits the submitted requests and takes completions. Returns true if there were
    /// completions.
    pub(crate) fn turn(&self) -> bool {
        if self.pending.get() == 0 && !self.must_look.get() {
            return false;
        }
        self.must_look.set(false);
        self.uncommitted.set(false);
        let mut core = self.core.borrow_mut();
        let Some(all) = core.as_mut() else { return false };
        let any = all.turn();
        self.pending.set(all.pending);
        let (mut wakers, mut ended) =
            (std::mem::take(&mut all.wakers), std::mem::take(&mut all.ended));
        drop(core);
        // The borrow ends before this call, because a woken task or a released lock may submit
        // other requests.
        wakers.drain(..).for_each(Waker::wake);
        ended.clear();
        if let Some(core) = self.core.borrow_mut().as_mut() {
            (core.wakers, core.ended) = (wakers, ended);
        }
        any
    }

    /// True if the thread may sleep: [`turn`](Self::turn) has passed every submitted request to the
    /// disk.
    pub(crate) fn may_sleep(&self) -> bool {
        !self.uncommitted.get()
    }

    /// Processes the end of a sleep: checks the queue for events and the requests for timeouts.
    pub(crate) fn after_sleep(&self) {
        self.must_look.set(true);
        if let Some(core) = self.core.borrow_mut().as_mut()
            && core.pending > 0
        {
            core.check_deadlines();
        }
    }

    /// Counts a request that the caller executes on the disk's file.
    pub(crate) fn count(&self, request: &Request) {
        if let Some(core) = self.core.borrow().as_ref() {
            core.traffic.count(request);
        }
    }

    /// Counts the end of a request that the caller has executed on the disk's file.
    pub(crate) fn count_end(&self, outcome: Result<(), DiskError>) {
        if let Some(core) = self.core.borrow().as_ref() {
            core.traffic.count_end(outcome);
        }
    }

    /// Requests an early end of all requests from the disk.
    pub(crate) fn cancel_all(&self) {
        if let Some(core) = self.core.borrow_mut().as_mut() {
            core.cancel(|_| true);
        }
    }

    /// True if the disk holds requests of this queue after an error of its storage.
    pub(crate) fn holds_requests(&self) -> bool {
        self.core.borrow().as_ref().is_some_and(|core| core.queue.holds_requests())
    }

    /// Applies the timeout also to requests that the disk holds after an error of its storage.
    pub(crate) fn limit_holds(&self) {
        if let Some(core) = self.core.borrow_mut().as_mut() {
            core.is_ending = true;
        }
    }

    /// Time until the next timeout check: the maximum duration of a sleep. `None` if no request is
    /// in flight.
    pub(crate) fn sleep_limit(&self) -> Option<Duration> {
        let core = self.core.borrow();
        let core = core.as_ref().filter(|core| core.pending > 0)?;
        Some(Duration::from_secs(core.due.into()).saturating_sub(core.started.elapsed()))
    }
}

/// Time at which a request exceeds its `timeout`, if it was submitted at `since`; all in seconds.
fn late(since: u32, timeout: u32) -> u32 {
    since.saturating_add(timeout).saturating_add(1)
}

/// Submits a request. If blocks have protection information, the queue generates the guard for a
/// write and checks it for a read. It does the same with the reference tag for protection types 1
/// and 2, where the tag is the block address.
fn submit(
    queue: &mut dyn Queue,
    protection: Option<&(u64, MetadataFormat)>,
    tag: u32,
    request: &Request,
    data: &mut Segments,
) -> Submitted {
    match protection {
        Some((block, format)) if matches!(request.op, Op::Read | Op::Write { .. }) => {
            let mut metadata = Metadata::default();
            let reference = if format.protection == 3 { 0 } else { PRINFO_REFTAG };
            metadata.fields.prinfo = PRINFO_PRACT | PRINFO_GUARD | reference;
            metadata.fields.ref_tag = request.offset / block;
            queue.submit_with_metadata(tag, request, &metadata, data)
        }
        _ => queue.submit(tag, request, data),
    }
}

impl Core {
    fn read_clock(&mut self) {
        self.now = u32::try_from(self.started.elapsed().as_secs()).unwrap_or(u32::MAX);
    }

    /// Reads the clock, and cancels requests if one may exceed its timeout.
    fn check_deadlines(&mut self) {
        self.read_clock();
        if self.now >= self.due {
            self.cancel_late();
        }
    }

    fn turn(&mut self) -> bool {
        if self.schedules_sources {
            self.queue.begin_turn(0);
        }
        self.queue.commit();
        let mut reaped = std::mem::take(&mut self.reaped);
        self.queue.reap(&mut |tag, outcome, segments| reaped.push((tag, outcome, segments)));
        let any = !reaped.is_empty();
        for (tag, outcome, segments) in reaped.drain(..) {
            self.ended(tag, outcome, segments);
        }
        self.reaped = reaped;
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(TURNS) {
            self.check_deadlines();
        }
        any || !self.wakers.is_empty()
    }

    /// Takes completions of requests that no future waits for.
    fn finish_turn(&mut self) {
        self.turn();
        self.wakers.clear();
        self.ended.clear();
    }

    fn ended(&mut self, tag: u32, outcome: Result<(), DiskError>, segments: Segments) {
        let Some(slot) = self.slots.get_mut(tag as usize) else { return };
        let give_back = |mut in_flight: InFlight| {
            if let Some(place) = in_flight.data.segments() {
                *place = segments;
            }
            in_flight
        };
        match std::mem::take(&mut slot.state) {
            State::Pending(in_flight) | State::Late(in_flight) => {
                slot.state = State::Done(outcome, give_back(in_flight));
                self.wakers.extend(slot.waker.take());
            }
            State::Abandoned(in_flight) => {
                self.ended.push(give_back(in_flight));
                self.free.push(tag);
            }
            state => {
                slot.state = state;
                return;
            }
        }
        self.traffic.count_end(outcome);
        self.pending = self.pending.saturating_sub(1);
    }

    /// Cancels requests that exceed the timeout. If a request with a buffer of this crate does not
    /// complete within `CANCELLED` after that, its future gets a timeout error. The slot keeps the
    /// buffer and the lock until the disk completes the request. A request with segments of the
    /// caller gets no timeout error, because the disk may still access the caller's memory.
    ///
    /// While the disk holds requests after an error of its storage, no request exceeds the timeout,
    /// unless the queue [is to end](Self::is_ending).
    fn cancel_late(&mut self) {
        let (now, timeout) = (self.now, self.timeout);
        if self.queue.holds_requests() && !self.is_ending {
            self.restart_timeouts();
        }
        self.cancel(|since| now.saturating_sub(since) > timeout);
        // The initial value is the earliest timeout of requests that are not submitted yet.
        // Requests in flight may require an earlier check.
        let (mut due, grace) = (late(now, timeout), CANCELLED.as_secs() as u32);
        for slot in &mut self.slots {
            let (State::Pending(in_flight) | State::Late(in_flight) | State::Abandoned(in_flight)) =
                &slot.state
            else {
                continue;
            };
            let late = late(in_flight.since, timeout);
            let expiry = late.saturating_add(grace);
            due = due.min(match now {
                now if now < late => late,
                now if now < expiry => expiry,
                _ => now.saturating_add(grace),
            });
            match std::mem::take(&mut slot.state) {
                State::Pending(in_flight @ InFlight { data: Data::Buffer(_), .. })
                    if now >= expiry =>
                {
                    slot.state = State::Late(in_flight);
                    self.wakers.extend(slot.waker.take());
                }
                state => slot.state = state,
            }
        }
        self.due = due;
    }

    /// Restarts the timeout of all requests in flight.
    fn restart_timeouts(&mut self) {
        for slot in &mut self.slots {
            if let State::Pending(in_flight)
            | State::Late(in_flight)
            | State::Abandoned(in_flight) = &mut slot.state
            {
                in_flight.since = self.now;
            }
        }
    }

    /// Cancels the requests whose submission time satisfies `fits`.
    fn cancel(&mut self, fits: impl Fn(u32) -> bool) {
        for (tag, slot) in (0..).zip(&self.slots) {
            if let State::Pending(in_flight) | State::Late(in_flight) | State::Abandoned(in_flight) =
                &slot.state
                && fits(in_flight.since)
            {
                tracing::debug!(tag, "a request takes too long and is cancelled");
                self.queue.cancel(tag);
            }
        }
    }
}

/// Number of queues that were dropped and whose disk has not completed all requests.
static UNFINISHED: AtomicUsize = AtomicUsize::new(0);

/// Number of queues of this process that were dropped and whose disk has not completed all
/// requests. The disk may still execute these requests.
#[must_use]
pub fn unfinished_queues() -> usize {
    UNFINISHED.load(Ordering::SeqCst)
}

impl Drop for Engine {
    /// Waits for the requests in flight, for a limited time. If the disk does not complete them in
    /// this time, the [thread](crate::threads) has the queue, the buffers and the locks of the
    /// ranges until their end, because the disk may still access the data.
    fn drop(&mut self) {
        let Some(mut core) = self.core.borrow_mut().take() else { return };
        let began = Instant::now();
        let mut is_cancelled = false;
        while core.pending > 0 {
            core.finish_turn();
            if core.pending == 0 {
                break;
            }
            let waited = began.elapsed();
            if waited > CANCELLED {
                tracing::warn!(
                    requests = core.pending,
                    "the storage has not answered requests of a client that is disconnected; later \
                     writes of the same blocks wait for its answers"
                );
                UNFINISHED.fetch_add(1, Ordering::SeqCst);
                core.traffic = Arc::default();
                let mut core = Some(core);
                leave(Box::new(move || {
                    let is_pending = |core: &mut Core| {
                        core.finish_turn();
                        core.pending > 0
                    };
                    if core.as_mut().is_some_and(is_pending) {
                        return false;
                    }
                    core = None;
                    UNFINISHED.fetch_sub(1, Ordering::SeqCst);
                    true
                }));
                return;
            }
            let is_due = waited > CANCELLED / 2 || core.queue.holds_requests();
            if is_due && !std::mem::replace(&mut is_cancelled, true) {
                core.cancel(|_| true);
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::BufferPool;
    use crate::locks::RangeLocks;
    use crate::threads::QueueThread;
    use shadowbell_testing::wait;
    use std::future::Future;
    use std::pin::pin;
    use std::rc::Rc;
    use std::sync::atomic::AtomicBool;
    use std::task::{Context, Poll};

    /// A queue that never completes a request.
    #[derive(Default)]
    struct Mute {
        holds_requests: bool,
        cancelled: Rc<Cell<u32>>,
    }

    impl Queue for Mute {
        fn holds_requests(&self) -> bool {
            self.holds_requests
        }

        fn cancel(&mut self, _: u32) {
            self.cancelled.set(self.cancelled.get() + 1);
        }

        fn submit(&mut self, _: u32, _: &Request, _: &mut Segments) -> Submitted {
            Submitted::Pending
        }
    }

    /// Tries to lock the first block.
    fn acquire(locks: &Arc<RangeLocks>) -> Option<Arc<RangeGuard>> {
        let mut context = Context::from_waker(Waker::noop());
        match pin!(locks.acquire(0, 512, false)).poll(&mut context) {
            Poll::Ready(guard) => Some(Arc::new(guard)),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_request_beside_a_hung_one_has_its_own_timeout() {
        // The test sets the engine's start time back instead of waiting for this timeout.
        let timeout = Duration::from_secs(1);
        let info = DiskInfo::new(512, 8);
        let engine = Engine::new(Box::new(Mute::default()), &info, timeout, Arc::default());
        let submit = || {
            let request = Request { op: Op::Flush, offset: 0, len: 0 };
            let begun = engine.submit(&request, Data::NONE, None, Waker::noop());
            assert!(matches!(begun, Begun::Slot(_)));
        };
        submit();
        // The first request was submitted long ago, and does not end after its cancellation.
        if let Some(core) = engine.core.borrow_mut().as_mut() {
            core.started -= Duration::from_secs(100);
        }
        engine.after_sleep();
        submit();
        let limit = engine.sleep_limit().unwrap();
        assert!(limit <= 2 * timeout, "{limit:?}");
        // The drop of the engine would wait for the requests.
        std::mem::forget(engine);
    }

    /// A write whose client got an error is not overtaken by a later write of the same block.
    #[test]
    fn a_write_that_timed_out_delays_later_writes_of_its_range() {
        // The start of the request is moved into the past below.
        let (info, timeout) = (DiskInfo::new(512, 8), Duration::from_secs(1));
        let engine = Engine::new(Box::new(Mute::default()), &info, timeout, Arc::default());
        let locks = Arc::new(RangeLocks::default());
        let request = Request { op: Op::Write { fua: false }, offset: 0, len: 512 };
        let data = Data::Buffer(BufferPool::new(1, 512).unwrap().take().unwrap());
        let Begun::Slot(tag) = engine.submit(&request, data, acquire(&locks), Waker::noop()) else {
            panic!("the request has ended");
        };
        assert!(acquire(&locks).is_some(), "concurrent writes share the range");
        // The request was submitted long ago.
        if let Some(core) = engine.core.borrow_mut().as_mut() {
            core.started -= Duration::from_secs(100);
        }
        engine.after_sleep();
        let ended = engine.poll(tag, Waker::noop()).expect("a timeout");
        assert_eq!(ended.outcome, Err(DiskError::Cancelled));
        assert!(acquire(&locks).is_none(), "the disk still has the first write");
        // The drop of the engine would wait for the request.
        std::mem::forget(engine);
    }

    /// A queue that completes its request when the flag is true.
    struct Slow(Arc<AtomicBool>, Option<(u32, Segments)>);

    impl Queue for Slow {
        fn submit(&mut self, tag: u32, _: &Request, data: &mut Segments) -> Submitted {
            self.1 = Some((tag, data.take()));
            Submitted::Pending
        }

        fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
            let ended = self.1.take_if(|_| self.0.load(Ordering::SeqCst));
            ended.into_iter().for_each(|(tag, data)| done(tag, Ok(()), data));
        }
    }

    /// The storage answers a write after the client and its queue have ended.
    #[test]
    fn the_lock_of_a_write_ends_with_the_write_after_the_drop_of_its_queue() {
        let (answers, locks) = (Arc::new(AtomicBool::new(false)), Arc::<RangeLocks>::default());
        let (its_answers, guard) = (Arc::clone(&answers), acquire(&locks));
        let thread = QueueThread::spawn("queue".to_owned(), move || {
            let queue = Slow(its_answers, None);
            // The timeout is not a limit of the test, which waits for no request of this age.
            let (info, timeout) = (DiskInfo::new(512, 8), Duration::from_secs(1));
            let engine = Engine::new(Box::new(queue), &info, timeout, Arc::default());
            let request = Request { op: Op::Write { fua: false }, offset: 0, len: 512 };
            let data = Data::Buffer(BufferPool::new(1, 512).unwrap().take().unwrap());
            let Begun::Slot(tag) = engine.submit(&request, data, guard, Waker::noop()) else {
                panic!("the request has ended");
            };
            engine.abandon(tag);
        });
        thread.unwrap().join();
        assert_eq!(unfinished_queues(), 1);
        assert!(acquire(&locks).is_none(), "the disk still has the write");
        answers.store(true, Ordering::SeqCst);
        wait::until("the end of the write", || acquire(&locks).is_some());
        wait::until("the end of the queue", || unfinished_queues() == 0);
    }

    #[test]
    fn held_requests_do_not_exceed_the_timeout() {
        for holds_requests in [false, true] {
            let cancelled = Rc::default();
            let queue = Mute { holds_requests, cancelled: Rc::clone(&cancelled) };
            // The start of the request is moved into the past below.
            let (info, timeout) = (DiskInfo::new(512, 8), Duration::from_secs(1));
            let engine = Engine::new(Box::new(queue), &info, timeout, Arc::default());
            let request = Request { op: Op::Discard, offset: 0, len: 512 };
            let begun = engine.submit(&request, Data::NONE, None, Waker::noop());
            assert!(matches!(begun, Begun::Slot(_)));
            // The request was submitted long ago.
            if let Some(core) = engine.core.borrow_mut().as_mut() {
                core.started -= Duration::from_secs(100);
            }
            engine.after_sleep();
            assert_eq!(cancelled.get(), u32::from(!holds_requests));
            // The timeout applies again if the client of the queue is gone.
            engine.limit_holds();
            if let Some(core) = engine.core.borrow_mut().as_mut() {
                core.started -= Duration::from_secs(100);
            }
            engine.after_sleep();
            assert_eq!(cancelled.get(), 2 - u32::from(holds_requests));
            std::mem::forget(engine);
        }
    }
}
