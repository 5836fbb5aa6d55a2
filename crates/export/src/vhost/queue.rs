//! Thread state of one virtio queue: takes requests, executes them, and answers them.

use super::direct::{self, Context, DirectQueue, SplitRing};
use super::inflight::{Found, Senseless, Tracker};
use super::request::{
    Chain, Completed, Job, QUEUE_SIZE, Refusal, Size, Status, carry_out, measure, parse, put,
};
use super::resubmit;
use super::ring::Ring;
use super::shared::DeviceShared;
use crate::io_thread::IoThread;
use ::shadowbell_memory::{EventFd, SharedBytes};
use shadowbell_block::{BlockDevice, BlockError};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::{Duration, Instant};
use vhost_user_backend::VringT;
use virtio_queue::QueueT;

/// Largest number of requests in flight per queue.
const SLOTS: usize = 128;
/// Largest number of data bytes in flight per queue; a single request may exceed it. With
/// requests of 128 KiB, as Linux sends them, all slots can be used.
const MAX_HELD: usize = 16 << 20;
/// Time limit for the requests of a queue that is stopped: longer than the driver's default
/// command timeout.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);
/// Polling interval while a page table check is awaited.
const LOOK: Duration = Duration::from_millis(1);

type Work = Pin<Box<dyn Future<Output = Completed> + Send>>;

struct Pending {
    chain: Chain,
    size: Size,
}

/// Result of an attempt to serve a queue directly on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direct {
    /// The queue was served, until something changed.
    Served,
    /// The queue must be served through the controller.
    Impossible,
    /// The frontend was disconnected.
    Refused,
}

/// virtio queue, and the state of its thread.
pub(super) struct BlkQueue {
    disk: BlockDevice,
    index: usize,
    pub(super) io: IoThread<Work>,
    pending: Vec<Option<Pending>>,
    /// Slots of completed requests; empty between uses, kept for its capacity.
    done: Vec<usize>,
    /// True if the guest was not notified of the latest answers.
    answered: bool,
    /// Request that waits for a slot or for memory.
    stalled: Option<Chain>,
    /// Requests in flight of a dead process, which are executed again.
    again: VecDeque<Chain>,
    /// Heads of such requests, for a queue that is served directly on the disk.
    again_direct: VecDeque<u16>,
    /// True if the queue was prepared since the frontend last started it.
    has_begun: bool,
    /// In-flight tracking, if the frontend has shared memory for it.
    tracker: Option<Tracker<SharedBytes>>,
    held: Size,
    /// Value of [`shadowbell_memory::sigbus::faults`] at the last check.
    faults: u64,
    pub(super) vring: Option<Ring>,
    /// True once an invalid queue was logged as a warning.
    complained: bool,
}

impl BlkQueue {
    pub(super) fn new(disk: &BlockDevice, queue: usize) -> io::Result<Self> {
        let disk = disk.on_queue(queue);
        Ok(Self {
            io: IoThread::new(&disk, SLOTS)?,
            disk,
            index: queue,
            pending: (0..SLOTS).map(|_| None).collect(),
            done: Vec::with_capacity(SLOTS),
            answered: false,
            stalled: None,
            again: VecDeque::new(),
            again_direct: VecDeque::new(),
            has_begun: false,
            tracker: None,
            held: Size::default(),
            faults: ::shadowbell_memory::sigbus::faults(),
            vring: None,
            complained: false,
        })
    }

    /// Logs that the guest's queue is invalid: a warning the first time, debug output later.
    pub(super) fn complain(&mut self, error: &virtio_queue::Error) {
        complain(&mut self.complained, self.index, error);
    }

    /// Prepares the queue after a start by the frontend, with the requests in flight of a dead
    /// process. Returns true if the queue may be served.
    fn begin_queue(&mut self, device: &DeviceShared, vring: &Ring, is_direct: bool) -> bool {
        if self.has_begun {
            return true;
        }
        if let Some(region) = device.inflight.get() {
            // Requests that outlived the last stop of the queue may be tracked as in flight, and
            // must not be executed twice concurrently, so they are awaited first.
            while self.io.tasks().reserved() > 0 {
                if !self.collect(device, vring) && self.io.prepare_timed_sleep() {
                    return false;
                }
            }
            let words = region.queue(self.index);
            let (size, used) = {
                let state = vring.get_ref();
                (state.get_queue().size(), state.get_queue().next_used())
            };
            let started = words
                .ok_or(Senseless::None)
                .and_then(|words| Tracker::start(words, region.entries(), size, used))
                .map_err(|error| error.to_string())
                .and_then(|(tracker, found)| {
                    self.tracker = Some(tracker);
                    found.map_or(Ok(()), |found| self.go_on(vring, &found, is_direct))
                });
            if let Err(error) = started {
                self.tracker = None;
                tracing::warn!(
                    queue = self.index,
                    "the frontend is disconnected: its in-flight tracking memory is invalid: {error}"
                );
                device.hang_up();
                return false;
            }
        }
        self.has_begun = true;
        true
    }

    /// Continues after the death of a process, or after a stop of the queue.
    fn go_on(&mut self, vring: &Ring, found: &Found, is_direct: bool) -> Result<(), String> {
        if is_direct {
            self.again_direct = found.heads.iter().copied().collect();
        } else {
            let memory = vring.memory();
            let chains = resubmit::chains(vring.get_ref().get_queue(), &memory, &found.heads);
            self.again = chains.map_err(|error| error.to_string())?.into();
        }
        vring.set_queue_next_avail(found.available);
        if !found.heads.is_empty() {
            let (queue, requests) = (self.index, found.heads.len());
            tracing::info!(
                queue,
                requests,
                "requests in flight of a dead process are executed again"
            );
        }
        // The dead process may not have notified the guest of its last answers.
        let _ = vring.signal_used_queue();
        Ok(())
    }

    /// Converts requests of a dead process that were to be executed directly on the disk, because
    /// the guest's memory has changed and the direct way is not possible any more. Returns true
    /// if the queue may be served.
    fn go_on_otherwise(&mut self, device: &DeviceShared, vring: &Ring) -> bool {
        if self.again_direct.is_empty() {
            return true;
        }
        let heads: Vec<_> = std::mem::take(&mut self.again_direct).into();
        let chains = resubmit::chains(vring.get_ref().get_queue(), &vring.memory(), &heads);
        match chains {
            Ok(chains) => self.again.extend(chains),
            Err(error) => {
                let queue = self.index;
                tracing::warn!(
                    queue,
                    "the frontend is disconnected: requests in flight of a dead process cannot be \
                     executed: {error}"
                );
                device.hang_up();
                return false;
            }
        }
        true
    }

    /// Serves the queue directly on the disk, until anything changes.
    pub(super) fn serve_direct(
        &mut self,
        device: &DeviceShared,
        vring: &Ring,
        waker: &EventFd,
    ) -> Direct {
        self.run_direct(device, vring, waker, |queue, complain| queue.serve(complain))
    }

    /// Implementation of [`serve_direct`](Self::serve_direct), with `run` as the serving
    /// function.
    pub(super) fn run_direct(
        &mut self,
        device: &DeviceShared,
        vring: &Ring,
        waker: &EventFd,
        run: impl FnOnce(DirectQueue<'_>, &mut dyn FnMut(&virtio_queue::Error)),
    ) -> Direct {
        let Some(local) = &device.local else { return Direct::Impossible };
        let faults = ::shadowbell_memory::sigbus::faults();
        if self.has_lost_memory(device) {
            return Direct::Refused;
        }
        let find = || {
            let table = direct::table(vring.current())?;
            let ring = SplitRing::new(vring.get_ref().get_queue(), &table)?;
            Some((table, ring))
        };
        if find().is_none() {
            return Direct::Impossible;
        }
        // The queue may have been served through the controller until now.
        if self.io.tasks().reserved() > 0 || self.stalled.is_some() || !self.again.is_empty() {
            self.finish(device);
        }
        if !self.begin_queue(device, vring, true) {
            return Direct::Refused;
        }
        let _serving = vring.begin_serving();
        let seen = (vring.changes(), device.changes());
        // A stop after this point changes the counters that were read above; an earlier one is
        // visible in `runs`.
        if !vring.runs() {
            return Direct::Served;
        }
        // The memory and the ring may have changed before the counters were read, so they are
        // looked up again.
        let Some((table, ring)) = find() else { return Direct::Impossible };
        let context = Context {
            index: self.index,
            device,
            vring,
            local,
            tracker: &mut self.tracker,
            again: &mut self.again_direct,
            waker,
            seen,
            faults,
        };
        let index = self.index;
        match DirectQueue::new(context, ring, &table) {
            Ok(queue) => {
                let complained = &mut self.complained;
                run(queue, &mut |error| complain(complained, index, error));
                Direct::Served
            }
            Err(error) => {
                tracing::warn!(
                    queue = index,
                    "a queue cannot be served directly on the disk: {error}"
                );
                Direct::Impossible
            }
        }
    }

    /// True if every request taken from the queue is answered.
    pub(super) fn is_idle(&mut self) -> bool {
        let is_left = self.stalled.is_some() || !self.again.is_empty();
        !is_left && self.io.tasks().reserved() == 0
    }

    /// Stops the queue, on request of the frontend or after its disconnect, by
    /// [`finish`](Self::finish). Returns true if the disk has no request of the queue any more.
    pub(super) fn stop(&mut self, device: &DeviceShared) -> bool {
        self.finish(device);
        self.has_begun = false;
        self.tracker = None;
        // The in-flight tracking still has these requests.
        self.again_direct.clear();
        self.io.tasks().reserved() == 0
    }

    /// Waits until all requests taken from the queue are answered, or until [`FINISH_TIMEOUT`].
    pub(super) fn finish(&mut self, device: &DeviceShared) {
        let Some(vring) = self.vring.clone() else { return };
        let deadline = Instant::now() + FINISH_TIMEOUT;
        loop {
            let mut any = false;
            while let Some(chain) = self.next_again() {
                if let Some(chain) = self.begin(device, &vring, chain) {
                    self.stalled = Some(chain);
                    break;
                }
                any = true;
            }
            any |= self.collect(device, &vring);
            self.notify(&vring);
            if self.io.tasks().reserved() == 0 && self.stalled.is_none() {
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let queue = self.index;
                tracing::warn!(queue, "requests of a stopped queue do not complete");
                // The guest's memory may be gone when these requests complete, so they are not
                // answered.
                self.pending.iter_mut().for_each(|pending| *pending = None);
                (self.stalled, self.held) = (None, Size::default());
                self.again.clear();
                return;
            }
            if !any && self.io.prepare_sleep() {
                let soon = self.stalled.as_ref().map(|_| Instant::now() + LOOK);
                self.io.wait(Some(soon.map_or(deadline, |soon| soon.min(deadline))), |_| {});
            }
        }
    }

    /// Next request among those that were already taken.
    fn next_again(&mut self) -> Option<Chain> {
        self.stalled.take().or_else(|| self.again.pop_front())
    }

    /// Takes new requests, starts them, and answers completed ones, until there is nothing to do
    /// but wait.
    pub(super) fn serve(
        &mut self,
        device: &DeviceShared,
        vring: &Ring,
    ) -> Result<(), virtio_queue::Error> {
        if !self.has_begun && !vring.runs() {
            return Ok(());
        }
        if !self.begin_queue(device, vring, false) || !self.go_on_otherwise(device, vring) {
            return Ok(());
        }
        // True if the available ring announced a request that was not found yet.
        let mut promised = false;
        loop {
            // Requests that were taken are answered even if the queue is disabled.
            let runs = vring.runs();
            if runs {
                vring.disable_notification()?;
            }
            let mut any = self.take(device, vring);
            any |= self.collect(device, vring);
            self.notify(vring);
            // Checked in each round, since a fast guest can keep the thread in this loop.
            let is_over = device.check_over().is_err() || !vring.get_ref().get_queue().ready();
            if is_over || self.has_lost_memory(device) {
                return Ok(());
            }
            if any {
                promised = false;
                continue;
            }
            // Without a request in flight, no completion wakes this thread for the stalled
            // request.
            let is_stuck = self.stalled.is_some() && self.held.pieces == 0;
            if is_stuck || device.page_table_quota.must_wait() {
                if self.io.prepare_sleep() {
                    self.io.wait(Some(Instant::now() + LOOK), |_| {});
                }
                continue;
            }
            // While the queue is polled, the guest need not send notifications.
            if self.io.spin() {
                continue;
            }
            // While a request waits for a slot, a notification would be useless.
            if runs && self.stalled.is_none() && vring.enable_notification()? {
                // An invalid index can announce requests forever.
                if std::mem::replace(&mut promised, true) {
                    return Err(virtio_queue::Error::InvalidAvailRingIndex);
                }
                continue;
            }
            if self.io.prepare_timed_sleep() {
                return Ok(());
            }
        }
    }

    /// Takes requests from the queue, if it runs and as long as there are slots. Returns true if
    /// any was taken.
    fn take(&mut self, device: &DeviceShared, vring: &Ring) -> bool {
        if device.page_table_quota.must_wait() {
            return false;
        }
        let memory = vring.memory();
        let mut any = false;
        // Bounded by the queue size, whatever the guest does to its ring meanwhile.
        for _ in 0..QUEUE_SIZE {
            let chain = match self.next_again() {
                Some(chain) => chain,
                None => {
                    let mut state = vring.get_mut();
                    // While this lock is held, the frontend cannot disable the queue.
                    if !state.is_enabled() || !state.get_queue().ready() {
                        break;
                    }
                    let next = state.get_queue_mut().pop_descriptor_chain(memory.clone());
                    let Some(chain) = next else { break };
                    if let Some(tracker) = &mut self.tracker {
                        tracker.taken(chain.head_index());
                    }
                    chain
                }
            };
            if let Some(chain) = self.begin(device, vring, chain) {
                self.stalled = Some(chain);
                break;
            }
            any = true;
        }
        any
    }

    /// Starts a request, or returns it if there is no slot or memory.
    fn begin(&mut self, device: &DeviceShared, vring: &Ring, chain: Chain) -> Option<Chain> {
        let size = measure(&chain);
        let Size { bytes, pieces } = self.held;
        let is_full = bytes + size.bytes > MAX_HELD
            || pieces.saturating_add(size.pieces) > device.page_table_quota.most_in_flight();
        if pieces > 0 && is_full || device.page_table_quota.must_wait() {
            return Some(chain);
        }
        let Some(slot) = self.io.tasks().reserve() else { return Some(chain) };
        let parsed = parse(&chain, &device.rules(), &device.id, size);
        device.page_table_quota.add(size.pieces);
        match parsed {
            Ok(job) => {
                self.held.bytes += size.bytes;
                self.held.pieces += size.pieces;
                self.io.tasks().start(slot, work(self.disk.clone(), job));
                if let Some(pending) = self.pending.get_mut(slot) {
                    *pending = Some(Pending { chain, size });
                }
            }
            Err(refusal) => {
                self.io.tasks().release(slot);
                let len = match refusal {
                    Refusal::Status(status) => put(&chain, &[], status),
                    Refusal::NoRoom => 0,
                };
                answer(vring, self.tracker.as_mut(), &chain, len);
                self.answered = true;
            }
        }
        None
    }

    /// Submits the started requests, and answers completed ones. Returns true if there was any
    /// work.
    fn collect(&mut self, device: &DeviceShared, vring: &Ring) -> bool {
        let Self { io, pending, held, done, answered, tracker, .. } = self;
        let busy = io.run_once(None, |slot, completed| {
            done.push(slot);
            let Some(pending) = pending.get_mut(slot).and_then(Option::take) else { return };
            held.bytes = held.bytes.saturating_sub(pending.size.bytes);
            held.pieces = held.pieces.saturating_sub(pending.size.pieces);
            let Completed { outcome, data, for_guest } = completed;
            let status = match &outcome {
                Ok(()) => Status::Ok,
                Err(BlockError::Unsupported { .. }) => Status::Unsupported,
                Err(error) => {
                    device.failures.record(error);
                    Status::IoError
                }
            };
            let data = if for_guest && outcome.is_ok() { data.as_slice() } else { &[] };
            let len = put(&pending.chain, data, status);
            answer(vring, tracker.as_mut(), &pending.chain, len);
            device.page_table_quota.add(pending.size.pieces);
        });
        *answered |= !done.is_empty();
        done.drain(..).for_each(|slot| io.tasks().release(slot));
        busy
    }

    /// True if part of the guest's memory was lost.
    fn has_lost_memory(&mut self, device: &DeviceShared) -> bool {
        let faults = ::shadowbell_memory::sigbus::faults();
        if faults == self.faults {
            return false;
        }
        let lost = device.has_lost_memory();
        if !lost {
            self.faults = faults;
        }
        lost
    }

    /// Interrupts the guest for new answers, unless it has suppressed that.
    fn notify(&mut self, vring: &Ring) {
        // On an error, the guest is notified.
        if std::mem::take(&mut self.answered)
            && vring.needs_notification().unwrap_or(true)
            && let Err(error) = vring.signal_used_queue()
        {
            tracing::debug!("the guest could not be notified of answers: {error}");
        }
    }
}

fn complain(complained: &mut bool, queue: usize, error: &virtio_queue::Error) {
    if std::mem::replace(complained, true) {
        tracing::debug!(queue, "the guest's queue is invalid: {error}");
    } else {
        tracing::warn!(queue, "the guest's queue is invalid: {error}");
    }
}

fn work(disk: BlockDevice, job: Job) -> Work {
    Box::pin(carry_out(disk, job))
}

fn answer(vring: &Ring, mut tracker: Option<&mut Tracker<SharedBytes>>, chain: &Chain, len: u32) {
    let head = chain.head_index();
    if let Some(tracker) = &mut tracker {
        tracker.answering(head);
    }
    match vring.add_used(head, len) {
        Ok(()) => {
            if let Some(tracker) = tracker {
                tracker.answered(head, vring.get_ref().get_queue().next_used());
            }
        }
        Err(error) => tracing::warn!("an answer does not fit into the guest's queue: {error}"),
    }
}
