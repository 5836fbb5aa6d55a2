//! Thread that serves one virtio queue directly on one queue of the disk.

use super::super::inflight::Tracker;
use super::super::request::{MAX_DATA, QUEUE_SIZE, Rules, SECTOR, Status, identifier};
use super::super::ring::Ring;
use super::super::shared::DeviceShared;
use super::poll_window::PollWindow;
use super::request::{Bad, Chain, Job, Piece, Request, part};
use super::sleep::Sleep;
use super::split_ring::SplitRing;
use crate::local_disk::LocalDisk;
use ::shadowbell_memory::page_tables::Awake;
use ::shadowbell_memory::{DmaTable, EventFd, Segments, SharedBytes, View};
use shadowbell_backend::{DiskError, Op, Queue, Request as DiskRequest, Submitted};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio_queue::Error;

/// Largest number of requests in flight.
const SLOTS: usize = 128;
/// Largest part of a request with data, in bytes, which every disk supports.
const PART: u64 = 1 << 20;
/// Largest part of a request without data, in bytes, unless the disk has a lower limit.
const LONG_PART: u64 = 1 << 30;
/// Time limit for the requests in flight of a queue that is left, until they are cancelled; and
/// the time limit after that.
const FINISH: Duration = Duration::from_secs(60);
const CANCELLED: Duration = Duration::from_secs(5);
/// Polling interval while a page table check is awaited.
const LOOK: Duration = Duration::from_millis(1);
/// Interval of the timeout checks.
const TIMES: Duration = Duration::from_secs(1);
/// Number of passes of a busy queue between two timeout checks.
const PASSES: u32 = 1 << 14;

/// Request in flight.
struct Slot {
    head: u16,
    status: u64,
    op: Op,
    offset: u64,
    len: u64,
    /// Completed bytes, and length of the part in flight.
    done: u64,
    part: u64,
    /// Guest memory of the data.
    data: Vec<Piece>,
    segments: Segments,
    /// Number of memory pieces of the whole request.
    pieces: usize,
    /// Time of submission, while the disk has the request.
    since: Option<Instant>,
}

impl Slot {
    fn new() -> Self {
        Self {
            head: 0,
            status: 0,
            op: Op::Flush,
            offset: 0,
            len: 0,
            done: 0,
            part: 0,
            data: Vec::new(),
            segments: Segments::new(),
            pieces: 0,
            since: None,
        }
    }
}

/// State of a queue that does not depend on the way in which it is served.
pub(in super::super) struct Context<'a> {
    pub(in super::super) index: usize,
    pub(in super::super) device: &'a DeviceShared,
    pub(in super::super) vring: &'a Ring,
    pub(in super::super) local: &'a LocalDisk,
    pub(in super::super) tracker: &'a mut Option<Tracker<SharedBytes>>,
    /// Heads of the requests in flight of a dead process, which are executed again.
    pub(in super::super) again: &'a mut VecDeque<u16>,
    /// Event that ends the thread's sleep.
    pub(in super::super) waker: &'a EventFd,
    /// Change counters of the queue and the device when they were looked up.
    pub(in super::super) seen: (u64, u64),
    pub(in super::super) faults: u64,
}

/// virtio queue while it is served directly.
pub(in super::super) struct DirectQueue<'a> {
    context: Context<'a>,
    rules: Rules,
    ring: SplitRing,
    /// Positions of the rings at the start.
    began: (u16, u16),
    view: View,
    disk: Box<dyn Queue>,
    takes_turns: bool,
    /// Requests that are delayed until two later ones are known, so that the disk's memory is
    /// prefetched by then. `None` if the disk needs no prefetch.
    ready: Option<VecDeque<usize>>,
    longest: u64,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Slots whose next part is to be started.
    unfinished: VecDeque<usize>,
    /// Number of requests at the disk, and memory pieces of these and the unfinished ones.
    pending: usize,
    pieces: usize,
    /// Request that waits for a slot.
    stalled: Option<u16>,
    chain: Chain,
    part: Vec<Piece>,
    reaped: Vec<(u32, Result<(), DiskError>, Segments)>,
    sleep: Sleep,
    window: PollWindow,
    passes: u32,
}

impl<'a> DirectQueue<'a> {
    /// Creates the state for a queue in its current configuration, with the current guest memory.
    ///
    /// # Errors
    /// The error of the system call if the resources of the disk's queue are exhausted.
    pub(in super::super) fn new(
        context: Context<'a>,
        ring: SplitRing,
        table: &Arc<DmaTable>,
    ) -> io::Result<Self> {
        let mut disk = context.local.disk.queue()?;
        disk.memory_changed(table);
        disk.may_wait();
        let events = [context.vring.changed(), context.waker];
        let sleep = Sleep::on(context.vring.kick(), events, &*disk)?;
        Ok(Self {
            rules: context.device.rules(),
            began: ring.places(),
            ring,
            view: View::new(Arc::clone(table)),
            takes_turns: disk.takes_turns(),
            ready: disk.wants_prefetch_hints().then(|| VecDeque::with_capacity(SLOTS)),
            longest: (disk.longest_inline() / SECTOR * SECTOR).clamp(SECTOR, LONG_PART),
            disk,
            slots: (0..SLOTS).map(|_| Slot::new()).collect(),
            free: (0..SLOTS).rev().collect(),
            unfinished: VecDeque::with_capacity(SLOTS),
            pending: 0,
            pieces: 0,
            stalled: None,
            chain: Chain::default(),
            part: Vec::new(),
            reaped: Vec::with_capacity(SLOTS),
            sleep,
            window: PollWindow::new(context.local.poll),
            passes: 0,
            context,
        })
    }

    /// Serves the queue until something changes, and completes the requests in flight. `complain`
    /// is called if the queue is invalid.
    pub(in super::super) fn serve(mut self, complain: &mut dyn FnMut(&Error)) {
        while self.poll(complain) {
            let began = Instant::now();
            self.sleep.wait(self.limit());
            self.window.slept(began.elapsed());
            self.cancel_late();
        }
        let _touches_memory = Awake::new();
        self.leave();
    }

    /// Serves the queue until there is no work and polling does not pay. Returns false if the
    /// queue is to be left.
    fn poll(&mut self, complain: &mut dyn FnMut(&Error)) -> bool {
        let _touches_memory = Awake::new();
        while !self.must_leave() {
            match self.pass(true) {
                Ok(true) => {
                    self.window.found();
                    self.look_at_times();
                    continue;
                }
                Ok(false) => {}
                // After the next notification, the queue may be valid again.
                Err(error) => {
                    complain(&error);
                    return true;
                }
            }
            if self.window.looks_again() {
                continue;
            }
            // While a request waits for a slot, a notification would be useless.
            if self.stalled.is_some() || !self.ring.ask_for_kicks() {
                return true;
            }
        }
        false
    }

    /// Executes the requests of the queue, including those that arrive meanwhile, until there is
    /// none left.
    pub(in super::super) fn run_dry(mut self, complain: &mut dyn FnMut(&Error)) {
        loop {
            match self.pass(true) {
                Ok(true) if !self.must_leave() => {}
                Ok(_) => return self.leave(),
                Err(error) => {
                    complain(&error);
                    return self.leave();
                }
            }
        }
    }

    /// Longest time for which the thread may sleep.
    fn limit(&self) -> Option<Duration> {
        match self.stalled {
            Some(_) => Some(LOOK),
            None => (self.pending > 0).then_some(TIMES),
        }
    }

    /// True if the queue is stopped, or anything else has changed.
    #[inline]
    fn must_leave(&mut self) -> bool {
        if self.has_changed() {
            return true;
        }
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

    /// True if the configuration has changed, so that no more requests may be taken.
    #[inline]
    fn has_changed(&self) -> bool {
        let Context { device, vring, seen, .. } = &self.context;
        device.is_over() || (vring.changes(), device.changes()) != *seen
    }

    /// Takes new requests if `takes` is set, starts them, and answers completed ones. Returns
    /// true if there was any work.
    #[inline]
    fn pass(&mut self, takes: bool) -> Result<bool, Error> {
        let mut any = false;
        if self.takes_turns {
            self.disk.begin_turn(self.context.index as u32);
        }
        if self.pending > 0 {
            any |= self.reap();
        }
        for _ in 0..self.unfinished.len() {
            let Some(slot) = self.unfinished.pop_front() else { break };
            self.advance(slot);
            any = true;
        }
        let outcome = self.take(takes);
        if self.pending > 0 {
            self.disk.commit();
        }
        self.ring.publish();
        if self.ring.wants_notification() {
            self.context.vring.signal();
        }
        outcome.map(|taken| any | taken)
    }

    /// Takes requests and starts them. Returns true if there was any.
    #[inline]
    fn take(&mut self, takes: bool) -> Result<bool, Error> {
        let mut any = false;
        // Bounded by the queue size, whatever the guest does to its ring meanwhile.
        for _ in 0..QUEUE_SIZE {
            let left = self.stalled.take().or_else(|| self.context.again.pop_front());
            let head = match left {
                Some(head) => head,
                None if !takes || self.has_changed() => break,
                None => {
                    let head = match self.ring.take() {
                        Ok(Some(head)) => head,
                        Ok(None) => break,
                        Err(error) => {
                            self.begin_rest();
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
        self.begin_rest();
        Ok(any)
    }

    /// Starts a request when the two requests behind it are known, or by `begin_rest`.
    #[inline]
    fn begin_soon(&mut self, slot: usize) {
        let Some(ready) = &mut self.ready else { return self.advance(slot) };
        for (index, distance) in [(Some(slot), 2), (ready.back().copied(), 1)] {
            if let Some(Slot { op, offset, len, .. }) = index.and_then(|at| self.slots.get(at)) {
                self.disk.prefetch_hint(*op, *offset, (*len).min(PART) as usize, distance);
            }
        }
        ready.push_back(slot);
        if ready.len() > 2
            && let Some(first) = ready.pop_front()
        {
            self.advance(first);
        }
    }

    #[inline]
    fn begin_rest(&mut self) {
        while let Some(slot) = self.ready.as_mut().and_then(VecDeque::pop_front) {
            self.advance(slot);
        }
    }

    /// Starts a request. Returns false if there is no slot or no memory for it.
    #[inline]
    fn begin(&mut self, head: u16) -> bool {
        let quota = &self.context.device.page_table_quota;
        if self.free.is_empty() || quota.must_wait() {
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
            // An invalid head is not put into the used ring.
            Err(Bad::NoRoom) if head >= self.ring.size() => {}
            Err(Bad::NoRoom) => self.answer(head, 0),
            Err(Bad::Status(status, at)) => self.end(head, at, 0, status),
            Ok(Request { job: Job::Identify { room }, status }) => {
                let id = identifier(&self.context.device.id, room);
                let given = self.put_data(&id);
                let (len, outcome) =
                    if given { (id.len() as u32, Status::Ok) } else { (0, Status::IoError) };
                self.end(head, status, len, outcome);
            }
            Ok(Request { job: Job::Disk { op, len: 0, .. }, status }) if op != Op::Flush => {
                self.end(head, status, 0, Status::Ok);
            }
            Ok(Request { job: Job::Disk { op, offset, len }, status }) => {
                let Some(slot) = self.free.pop() else { return false };
                let Some(there) = self.slots.get_mut(slot) else { return false };
                let data = match op {
                    Op::Read => &mut self.chain.write,
                    _ => &mut self.chain.read,
                };
                std::mem::swap(&mut there.data, data);
                (there.head, there.status, there.op) = (head, status, op);
                (there.offset, there.len, there.done, there.pieces) = (offset, len, 0, pieces);
                self.pieces += pieces;
                self.begin_soon(slot);
            }
        }
        true
    }

    /// Writes bytes to the request's data buffer in the guest's memory.
    fn put_data(&mut self, bytes: &[u8]) -> bool {
        let mut data = Segments::new();
        part(&self.chain.write, 0, bytes.len() as u64, &mut self.part);
        data.resolve_ranges(&self.view, &self.part, true).is_ok()
            && data.write_from(0, bytes).is_some()
    }

    /// Starts the next part of a request.
    #[inline]
    fn advance(&mut self, index: usize) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        let has_data = matches!(slot.op, Op::Read | Op::Write { .. });
        let most = if has_data { PART } else { self.longest };
        slot.part = (slot.len - slot.done).min(most);
        if has_data {
            let data = if slot.part == slot.len {
                &slot.data
            } else {
                part(&slot.data, slot.done, slot.part, &mut self.part);
                &self.part
            };
            let write = slot.op == Op::Read;
            if slot.segments.resolve_ranges(&self.view, data, write).is_err() {
                self.finish(index, Status::IoError);
                return;
            }
        }
        let request = DiskRequest { op: slot.op, offset: slot.offset + slot.done, len: slot.part };
        match self.disk.submit(index as u32, &request, &mut slot.segments) {
            Submitted::Done(outcome) => self.ended(index, outcome),
            Submitted::Pending => {
                slot.since = Some(Instant::now());
                self.pending += 1;
            }
        }
    }

    /// Takes completions of the disk. Returns true if there was any.
    fn reap(&mut self) -> bool {
        let mut reaped = std::mem::take(&mut self.reaped);
        self.disk.reap(&mut |tag, outcome, segments| reaped.push((tag, outcome, segments)));
        let any = !reaped.is_empty();
        for (tag, outcome, segments) in reaped.drain(..) {
            let index = tag as usize;
            let Some(slot) = self.slots.get_mut(index) else { continue };
            if slot.since.take().is_none() {
                continue;
            }
            slot.segments = segments;
            self.pending -= 1;
            self.ended(index, outcome);
        }
        self.reaped = reaped;
        any
    }

    /// Processes the end of a part of a request.
    #[inline]
    fn ended(&mut self, index: usize, outcome: Result<(), DiskError>) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        match outcome {
            Ok(()) => {
                slot.done += slot.part;
                if slot.done < slot.len {
                    self.unfinished.push_back(index);
                } else {
                    self.finish(index, Status::Ok);
                }
            }
            Err(DiskError::Unsupported) => self.finish(index, Status::Unsupported),
            Err(error) => {
                self.context.device.failures.record_disk(&error);
                self.finish(index, Status::IoError);
            }
        }
    }

    /// Processes the end of a request.
    #[inline]
    fn finish(&mut self, index: usize, status: Status) {
        let Some(slot) = self.slots.get_mut(index) else { return };
        let (head, at, pieces) = (slot.head, slot.status, slot.pieces);
        let is_read = slot.op == Op::Read && status == Status::Ok;
        let len = if is_read { slot.len.min(MAX_DATA as u64) as u32 } else { 0 };
        self.free.push(index);
        self.pieces -= pieces;
        self.end(head, at, len, status);
        self.context.device.page_table_quota.add(pieces);
    }

    /// Answers a request, with `len` bytes of data in the guest's memory.
    #[inline]
    fn end(&mut self, head: u16, status_at: u64, len: u32, status: Status) {
        let written = self.view.write(status_at, &[status as u8]).is_ok();
        self.answer(head, if written { len + 1 } else { 0 });
    }

    #[inline]
    fn answer(&mut self, head: u16, len: u32) {
        let Some(tracker) = self.context.tracker else {
            self.ring.put(head, len);
            return;
        };
        // The tracking describes one request at a time, so each answer is published separately.
        tracker.answering(head);
        self.ring.put(head, len);
        self.ring.publish();
        tracker.answered(head, self.ring.places().1);
    }

    /// Checks the timeouts of requests once per `PASSES` passes.
    #[inline]
    fn look_at_times(&mut self) {
        self.passes = self.passes.wrapping_add(1);
        if self.passes.is_multiple_of(PASSES) {
            self.cancel_late();
        }
    }

    fn cancel_late(&mut self) {
        if self.pending == 0 {
            return;
        }
        let (now, timeout) = (Instant::now(), self.context.local.timeout);
        for (slot, index) in self.slots.iter().zip(0..) {
            if slot.since.is_some_and(|since| now.saturating_duration_since(since) > timeout) {
                tracing::debug!(queue = self.context.index, "a request takes too long");
                self.disk.cancel(index);
            }
        }
    }

    /// Completes the requests in flight, and stores the positions of the rings.
    fn leave(mut self) {
        let device = self.context.device;
        self.ring.ask_for_kicks();
        // From here on, no request is taken, and the frontend need not wait for the requests in
        // flight.
        self.context.vring.end_serving();
        let mut deadline = Instant::now() + FINISH;
        let mut is_cancelled = false;
        loop {
            let any = self.pass(false).unwrap_or(false);
            let is_done = self.pending == 0
                && self.unfinished.is_empty()
                && self.stalled.is_none()
                && self.context.again.is_empty();
            if is_done {
                break;
            }
            let now = Instant::now();
            if now >= deadline {
                // If the next process executed the tracked requests too, the two executions would
                // conflict, so they are awaited.
                let is_waited_for = self.context.tracker.is_some() && device.is_over();
                if is_cancelled && (device.is_ending() || !is_waited_for) {
                    break;
                }
                if !is_cancelled {
                    let queue = self.context.index;
                    tracing::warn!(queue, "requests of a stopped queue do not complete");
                }
                for (slot, index) in self.slots.iter().zip(0..) {
                    if slot.since.is_some() {
                        self.disk.cancel(index);
                    }
                }
                (is_cancelled, deadline) = (true, now + CANCELLED);
            }
            if !any {
                let left = deadline.saturating_duration_since(now);
                self.sleep.wait(Some(self.limit().unwrap_or(LOOK).min(left)));
            }
        }
        self.context.again.clear();
        self.context.vring.give_back(self.began, self.ring.places());
    }
}
