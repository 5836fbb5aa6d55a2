//! Serving of one virtio queue: requests are taken from the guest's rings, executed on the thread's
//! queue of the disk, and answered.
//!
//! If a request consists of whole blocks, the disk transfers the data directly from and to the
//! guest's memory. The thread polls the available ring for some time before it sleeps. While it
//! polls, it suppresses notifications.

use super::chain::{Bad, Chain, Request};
use super::inflight::Tracker;
use super::request::{Job as Parsed, MAX_DATA, QUEUE_SIZE, Rules, Status, identifier};
use super::ring::Ring;
use super::shared::DeviceShared;
use super::split_ring::{InvalidIndex, SplitRing};
use crate::io_thread::{FIRST, IoThread};
use ::shadowbell_memory::page_tables::Awake;
use ::shadowbell_memory::{DmaTable, EventFd, Segments, SharedBytes, View};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use shadowbell_block::{BlockDevice, BlockError, BlockQueue, Zeroes};
use shadowbell_disk::{DiskError, Op};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Largest number of requests in flight.
const SLOTS: usize = 128;
/// Largest number of bytes that the disk prefetches for a request.
const PREFETCH: u64 = 1 << 20;
/// Time limit for the requests in flight of a queue that is no longer served. After this time they
/// are cancelled. `CANCELLED` is the time limit after the cancellation.
const FINISH: Duration = Duration::from_secs(60);
const CANCELLED: Duration = Duration::from_secs(5);
/// Polling interval of a thread that waits for a page table check.
const STALL_CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// Disk operation, and its data in the guest's memory.
pub(super) struct Job {
    op: Op,
    offset: u64,
    len: u64,
    data: Segments,
}

/// Result of a job, with the job's list of segments.
pub(super) struct Completed {
    outcome: Result<(), BlockError>,
    data: Segments,
}

/// Executes a job.
pub(super) async fn execute(disk: BlockQueue, job: Job) -> Completed {
    let Job { op, offset, len, data } = job;
    let moved = match op {
        Op::Read => disk.read_to(offset, data).await,
        Op::Write { fua } => disk.write_from(offset, data, fua).await,
        Op::Flush => disk.flush().await.map(|()| data),
        Op::Discard => disk.discard(offset, len).await.map(|()| data),
        Op::WriteZeroes { deallocate, fua } => {
            let how = Zeroes { deallocate, fua, fast_only: false };
            disk.write_zeroes(offset, len, how).await.map(|()| data)
        }
        _ => Err(BlockError::Unsupported { operation: "the request" }),
    };
    match moved {
        Ok(data) => Completed { outcome: Ok(()), data },
        Err(error) => Completed { outcome: Err(error), data: Segments::new() },
    }
}

/// Request in flight.
#[derive(Clone, Copy, Default)]
struct Pending {
    head: u16,
    status: u64,
    /// Number of bytes of a read that are written to the guest's memory.
    len: u32,
    /// Number of memory pieces.
    pieces: usize,
}

/// State of a queue that exists longer than a [`ServedQueue`].
pub(super) struct Context<'a> {
    pub(super) index: usize,
    pub(super) device: &'a DeviceShared,
    pub(super) vring: &'a Ring,
    pub(super) tracker: &'a mut Option<Tracker<SharedBytes>>,
    /// Heads of the requests that are executed again: a dead process had them in flight, or the
    /// disk held them when the queue was last served.
    pub(super) replays: &'a mut VecDeque<u16>,
    /// Change counter of the queue when its configuration was read.
    pub(super) seen: u64,
    pub(super) faults: u64,
}

/// virtio queue while it is served.
pub(super) struct ServedQueue<'a, F> {
    context: Context<'a>,
    rules: Rules,
    ring: SplitRing,
    /// Positions in the two rings at which the thread started to serve the queue.
    began: (u16, u16),
    view: View,
    io: IoThread<F>,
    disk: BlockQueue,
    make: fn(BlockQueue, Job) -> F,
    kick: Option<EventFd>,
    /// Requests whose start is delayed until two later requests are known. Meanwhile the disk
    /// prefetches the memory that these requests will access. `None` if the disk needs no prefetch.
    ready: Option<VecDeque<(usize, Job)>>,
    /// Requests in flight, by slot.
    requests: Vec<Pending>,
    /// Number of memory pieces of the requests in flight.
    pieces: usize,
    /// Request that waits for a slot.
    stalled: Option<u16>,
    chain: Chain,
    /// Unused lists of segments, for reuse by later requests.
    spare: Vec<Segments>,
    /// Completed requests. The list is empty between uses, and keeps its capacity.
    done: Vec<(usize, Completed)>,
    /// True if cancelled requests get no answer, because they are executed again later.
    leaves_cancelled: bool,
    /// Heads of the cancelled requests that got no answer.
    unanswered: Vec<u16>,
}

impl<'a, F: Future<Output = Completed>> ServedQueue<'a, F> {
    /// Creates the state for a queue in its current configuration, with the current guest memory.
    /// `make` is [`execute`]. It is a parameter, because the type of its future has no name.
    ///
    /// # Errors
    /// The error of the system call if the resources for the disk's queue are exhausted.
    pub(super) fn new(
        context: Context<'a>,
        ring: SplitRing,
        table: &Arc<DmaTable>,
        disk: &BlockDevice,
        make: fn(BlockQueue, Job) -> F,
    ) -> io::Result<Self> {
        let mut io = IoThread::new(SLOTS, context.vring.event().try_clone()?)?;
        let disk = io.open(disk)?;
        let view = View::new(Arc::clone(table));
        disk.memory_changed(&view);
        let kick = context.vring.kick();
        if let Some(kick) = &kick {
            io.add_fd(kick.as_fd(), FIRST, EventFlags::IN)?;
        }
        Ok(Self {
            rules: context.device.rules(),
            began: ring.places(),
            ring,
            view,
            ready: disk.uses_prefetch_hints().then(|| VecDeque::with_capacity(SLOTS)),
            io,
            disk,
            make,
            kick,
            requests: vec![Pending::default(); SLOTS],
            pieces: 0,
            stalled: None,
            chain: Chain::default(),
            spare: Vec::new(),
            done: Vec::with_capacity(SLOTS),
            leaves_cancelled: false,
            unanswered: Vec::new(),
            context,
        })
    }

    /// Serves the queue until its configuration or the memory changes. Then completes the requests
    /// in flight. `log_error` is called if the queue is invalid.
    pub(super) fn serve(mut self, log_error: &mut dyn FnMut(&InvalidIndex)) {
        while self.poll(log_error) {
            // No event is signalled for a request that waits for a page table check, so the sleep
            // has a limit.
            self.sleep(self.stalled.map(|_| Instant::now() + STALL_CHECK_INTERVAL));
        }
        let _touches_memory = Awake::new();
        self.shut_down();
    }

    fn sleep(&mut self, until: Option<Instant>) {
        if !self.io.prepare_sleep() {
            return;
        }
        self.io.wait(until, |_| {});
        if let Some(kick) = &self.kick {
            kick.drain();
        }
    }

    /// Serves the queue until there was no work for the polling time. Returns false if the thread
    /// has to stop serving the queue.
    fn poll(&mut self, log_error: &mut dyn FnMut(&InvalidIndex)) -> bool {
        let _touches_memory = Awake::new();
        while !self.must_leave() {
            match self.pass(true) {
                Ok(true) => {
                    self.io.found();
                    continue;
                }
                Ok(false) => {}
                // The thread waits for the next notification, because the guest may have corrected
                // the queue by then. If guest memory is lost, the queue cannot be corrected.
                Err(error) => {
                    log_error(&error);
                    return !self.must_leave();
                }
            }
            if self.io.polls_again() {
                continue;
            }
            // While a request waits for a slot, the thread can take no more requests, so it needs
            // no notifications.
            if self.stalled.is_some() || !self.ring.ask_for_kicks() {
                return true;
            }
        }
        false
    }

    /// Executes all requests of the queue, including requests that arrive meanwhile.
    pub(super) fn run_dry(mut self, log_error: &mut dyn FnMut(&InvalidIndex)) {
        loop {
            match self.pass(true) {
                Ok(true) if !self.must_leave() => {}
                Ok(_) => return self.shut_down(),
                Err(error) => {
                    log_error(&error);
                    return self.shut_down();
                }
            }
        }
    }

    /// True if the thread has to stop serving the queue, because its configuration has changed or
    /// memory of the guest was lost.
    #[inline]
    fn must_leave(&mut self) -> bool {
        self.has_changed() || self.has_lost_memory()
    }

    /// True if memory of the guest was lost. Without a fault in any guest's memory, the check is
    /// one load.
    #[inline]
    fn has_lost_memory(&mut self) -> bool {
        let now = ::shadowbell_memory::sigbus::faults();
        if now == self.context.faults {
            return false;
        }
        if self.context.device.has_lost_memory() {
            return true;
        }
        self.context.faults = now;
        false
    }

    /// True if the configuration has changed. Then no more requests may be taken.
    #[inline]
    fn has_changed(&self) -> bool {
        let Context { device, vring, seen, .. } = &self.context;
        device.is_over() || vring.changes() != *seen
    }

    /// If `takes` is true, takes new requests and starts them. Then answers completed requests.
    /// Returns true if there was any work.
    #[inline]
    fn pass(&mut self, takes: bool) -> Result<bool, InvalidIndex> {
        let outcome = self.take(takes);
        let any = self.collect();
        self.ring.publish();
        if self.ring.wants_notification() {
            self.context.vring.signal();
        }
        outcome.map(|taken| any | taken)
    }

    /// Takes requests and starts them. Returns true if there were any.
    #[inline]
    fn take(&mut self, takes: bool) -> Result<bool, InvalidIndex> {
        let mut any = false;
        // The loop is limited by the queue size, even if the guest changes its ring all the time.
        for _ in 0..QUEUE_SIZE {
            let left = self.stalled.take().or_else(|| self.context.replays.pop_front());
            let head = match left {
                Some(head) => head,
                None if !takes || self.has_changed() => break,
                None => {
                    let head = match self.ring.take() {
                        Ok(Some(head)) => head,
                        Ok(None) => break,
                        Err(error) => {
                            self.start_deferred();
                            return Err(error);
                        }
                    };
                    if !any {
                        self.ring.suppress_kicks();
                    }
                    if let Some(tracker) = self.context.tracker {
                        tracker.taken(head);
                    }
                    head
                }
            };
            if !self.begin(head) {
                self.stalled = Some(head);
                break;
            }
            any = true;
        }
        self.start_deferred();
        Ok(any)
    }

    /// Delays the start of a request until two later requests are known, or until `start_deferred`.
    #[inline]
    fn defer(&mut self, slot: usize, job: Job) {
        let Some(ready) = &mut self.ready else { return self.start(slot, job) };
        let others = ready.back().map(|(_, job)| job);
        for (job, distance) in [(Some(&job), 2), (others, 1)] {
            if let Some(Job { op, offset, len, .. }) = job {
                self.disk.prefetch_hint(*op, *offset, (*len).min(PREFETCH) as usize, distance);
            }
        }
        ready.push_back((slot, job));
        if ready.len() > 2
            && let Some((slot, job)) = ready.pop_front()
        {
            self.start(slot, job);
        }
    }

    #[inline]
    fn start_deferred(&mut self) {
        while let Some((slot, job)) = self.ready.as_mut().and_then(VecDeque::pop_front) {
            self.start(slot, job);
        }
    }

    #[inline]
    fn start(&mut self, slot: usize, job: Job) {
        let future = (self.make)(self.disk.clone(), job);
        if let Some(completed) = self.io.start_now(slot, future) {
            self.finish(slot, completed);
        }
    }

    /// Starts a request. Returns false if no slot or no memory quota is free for it.
    #[inline]
    fn begin(&mut self, head: u16) -> bool {
        let quota = &self.context.device.page_table_quota;
        if self.io.tasks().reserved() == SLOTS || quota.must_wait() {
            return false;
        }
        self.chain.read(&self.ring, &self.view, head);
        let pieces = self.chain.pieces();
        let most = quota.most_in_flight();
        if self.pieces > 0 && self.pieces.saturating_add(pieces) > most {
            return false;
        }
        quota.add(pieces);
        match self.chain.parse(&self.view, &self.rules) {
            // A head outside of the queue must not be put into the used ring.
            Err(Bad::NoRoom) if head >= self.ring.size() => {}
            Err(Bad::NoRoom) => self.reply(head, 0),
            Err(Bad::Status(status, at)) => self.end(head, at, 0, status),
            Ok(Request { job: Parsed::Identify { room }, status }) => {
                let id = identifier(&self.context.device.id, room);
                let given = self.put_data(&id);
                let (len, outcome) =
                    if given { (id.len() as u32, Status::Ok) } else { (0, Status::IoError) };
                self.end(head, status, len, outcome);
            }
            Ok(Request { job: Parsed::Disk { op, len: 0, .. }, status }) if op != Op::Flush => {
                self.end(head, status, 0, Status::Ok);
            }
            Ok(Request { job: Parsed::Disk { op, offset, len }, status }) => {
                let (ranges, write) = match op {
                    Op::Read => (&self.chain.write, true),
                    Op::Write { .. } => (&self.chain.read, false),
                    _ => (const { &Vec::new() }, false),
                };
                let mut data = self.spare.pop().unwrap_or_default();
                if data.resolve_ranges(&self.view, ranges, write).is_err() {
                    self.end(head, status, 0, Status::IoError);
                    return true;
                }
                let Some(slot) = self.io.tasks().reserve() else { return false };
                let filled = if write { len.min(MAX_DATA as u64) as u32 } else { 0 };
                if let Some(request) = self.requests.get_mut(slot) {
                    *request = Pending { head, status, len: filled, pieces };
                }
                self.pieces += pieces;
                self.defer(slot, Job { op, offset, len, data });
            }
        }
        true
    }

    /// Writes bytes to the request's data buffer in the guest's memory.
    fn put_data(&mut self, mut bytes: &[u8]) -> bool {
        self.chain.write.iter().all(|(at, len)| {
            let (now, later) = bytes.split_at(bytes.len().min(*len));
            bytes = later;
            now.is_empty() || self.view.write(*at, now).is_ok()
        })
    }

    /// Submits the started requests, and answers completed ones. Returns true if there was any
    /// work.
    #[inline]
    fn collect(&mut self) -> bool {
        let mut done = std::mem::take(&mut self.done);
        let busy = self.io.run_once(|slot, completed| done.push((slot, completed)));
        for (slot, completed) in done.drain(..) {
            self.finish(slot, completed);
        }
        self.done = done;
        busy
    }

    /// Answers a completed request.
    #[inline]
    fn finish(&mut self, slot: usize, Completed { outcome, mut data }: Completed) {
        self.io.tasks().release(slot);
        let request = self.requests.get(slot).copied().unwrap_or_default();
        let answer = match outcome {
            Ok(()) => Some((request.len, Status::Ok)),
            Err(BlockError::Disk(DiskError::Cancelled)) if self.leaves_cancelled => None,
            Err(error) if error.errno() == Errno::NOTSUP => Some((0, Status::Unsupported)),
            Err(error) => {
                self.context.device.failures.record(&error);
                Some((0, Status::IoError))
            }
        };
        data.rewind();
        self.spare.push(data);
        self.pieces -= request.pieces;
        match answer {
            Some((len, status)) => self.end(request.head, request.status, len, status),
            None => self.unanswered.push(request.head),
        }
        self.context.device.page_table_quota.add(request.pieces);
    }

    /// Answers a request whose answer has `len` bytes of data in the guest's memory. If memory was
    /// lost, the data may be missing, so no request succeeds.
    #[inline]
    fn end(&mut self, head: u16, status_at: u64, len: u32, status: Status) {
        let (len, status) =
            if self.has_lost_memory() { (0, Status::IoError) } else { (len, status) };
        let written = self.view.write(status_at, &[status as u8]).is_ok();
        self.reply(head, if written { len + 1 } else { 0 });
    }

    #[inline]
    fn reply(&mut self, head: u16, len: u32) {
        let Some(tracker) = self.context.tracker else {
            self.ring.put(head, len);
            return;
        };
        // The tracking can describe only one answer at a time, so each answer is published
        // separately.
        tracker.answering(head);
        self.ring.put(head, len);
        self.ring.publish();
        tracker.replied(head, self.ring.places().1);
    }

    /// Completes the requests in flight, and stores the positions in the rings.
    fn shut_down(mut self) {
        let device = self.context.device;
        self.ring.ask_for_kicks();
        // From this call on, no request is taken. The frontend need not wait until the requests in
        // flight complete.
        self.context.vring.end_serving();
        let mut deadline = Instant::now() + FINISH;
        let mut is_cancelled = false;
        loop {
            let any = self.pass(false).unwrap_or(false);
            let is_done = self.io.tasks().reserved() == 0
                && self.stalled.is_none()
                && self.context.replays.is_empty();
            if is_done {
                break;
            }
            let now = Instant::now();
            // Requests that the disk holds get no answer if they are executed again: by the next
            // process if the server ends, otherwise by the next start of a queue with in-flight
            // tracking.
            if self.disk.holds_requests() {
                self.leaves_cancelled = self.context.tracker.is_some() || device.is_ending();
                self.disk.cancel_all();
            }
            if now >= deadline {
                // The thread waits longer if requests are tracked: the next session executes them
                // again, and must not do so while this disk queue still executes them.
                let is_waited_for = self.context.tracker.is_some() && device.is_disconnected();
                if is_cancelled && (device.is_ending() || !is_waited_for) {
                    break;
                }
                if !is_cancelled {
                    let queue = self.context.index;
                    tracing::warn!(queue, "requests of a stopped queue do not complete");
                }
                self.disk.cancel_all();
                (is_cancelled, deadline) = (true, now + CANCELLED);
            }
            if !any {
                let soon =
                    self.stalled.map_or(deadline, |_| deadline.min(now + STALL_CHECK_INTERVAL));
                self.sleep(Some(soon));
            }
        }
        self.context.replays.clear();
        self.context.replays.extend(self.unanswered);
        self.context.vring.give_back(self.began, self.ring.places());
    }
}
