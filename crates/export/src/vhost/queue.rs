//! One virtio queue of the device: takes requests, carries them out, and answers them.

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

/// Requests of one queue that are in flight.
const SLOTS: usize = 128;
/// Bytes of data of one queue's requests; one request is always taken. A guest whose requests have
/// 128 KiB, as Linux's do, has as many as there are slots.
const MAX_HELD: usize = 16 << 20;
/// How long a queue that is stopped waits for its requests: longer than the driver waits for a
/// command by default.
const FINISH_TIMEOUT: Duration = Duration::from_secs(60);
/// How often somebody who waits for a look at the page tables asks whether it is over.
const LOOK: Duration = Duration::from_millis(1);

type Work = Pin<Box<dyn Future<Output = Completed> + Send>>;

struct Pending {
    chain: Chain,
    size: Size,
}

/// What came of a queue that was to be served straight from the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direct {
    /// It was, until something changed.
    Served,
    /// It has to be served in the other way.
    Impossible,
    /// The frontend was sent away.
    Refused,
}

/// A queue, and the state of the thread that serves it.
pub(super) struct BlkQueue {
    disk: BlockDevice,
    index: usize,
    pub(super) io: IoThread<Work>,
    pending: Vec<Option<Pending>>,
    /// Kept for its capacity.
    done: Vec<usize>,
    /// There are answers of which the guest was not notified.
    answered: bool,
    /// A request for which there is no slot or no memory at the moment.
    stalled: Option<Chain>,
    /// Requests that a process before has left.
    again: VecDeque<Chain>,
    /// As these, of a queue that is served straight from the disk.
    again_direct: VecDeque<u16>,
    /// It was begun with, since the frontend has started it last.
    has_begun: bool,
    /// Where it is written down what is in flight.
    tracker: Option<Tracker<SharedBytes>>,
    held: Size,
    /// [`shadowbell_memory::sigbus::faults`] when it was last looked at.
    faults: u64,
    pub(super) vring: Option<Ring>,
    /// That the guest's queue makes no sense was logged.
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

    /// Logs that the guest's queue makes no sense: the first time as a warning.
    pub(super) fn complain(&mut self, error: &virtio_queue::Error) {
        complain(&mut self.complained, self.index, error);
    }

    /// Begins with the queue, if that is still to be done: with what a process before has left.
    /// Whether it may be served now.
    fn begin_queue(&mut self, device: &DeviceShared, vring: &Ring, is_direct: bool) -> bool {
        if self.has_begun {
            return true;
        }
        if let Some(region) = device.inflight.get() {
            // What could not be waited for when it was stopped may be written down as being in
            // flight, and must not be so twice.
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
                    "the frontend is sent away: the memory with its requests in flight makes no \
                     sense: {error}"
                );
                device.hang_up();
                return false;
            }
        }
        self.has_begun = true;
        true
    }

    /// Goes on where a process before has died, or where the queue was stopped.
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
            tracing::info!(queue, requests, "requests of a process before are carried out again");
        }
        // It may have died before it notified the guest.
        let _ = vring.signal_used_queue();
        Ok(())
    }

    /// What a process before has left, and was to be done straight from the disk, is done
    /// otherwise: the guest's memory has changed, and is no more as that needs it. Whether the
    /// queue may be served.
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
                    "the frontend is sent away: requests of a process before can not be carried \
                     out: {error}"
                );
                device.hang_up();
                return false;
            }
        }
        true
    }

    /// Serves the queue straight from the disk, until anything changes.
    pub(super) fn serve_direct(
        &mut self,
        device: &DeviceShared,
        vring: &Ring,
        waker: &EventFd,
    ) -> Direct {
        self.run_direct(device, vring, waker, |queue, complain| queue.serve(complain))
    }

    /// As [`serve_direct`](Self::serve_direct), by this `run`.
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
        // It may have been served otherwise until now.
        if self.io.tasks().reserved() > 0 || self.stalled.is_some() || !self.again.is_empty() {
            self.finish(device);
        }
        if !self.begin_queue(device, vring, true) {
            return Direct::Refused;
        }
        let _serving = vring.begin_serving();
        let seen = (vring.changes(), device.changes());
        // Who stops it after this is noticed by that; who has stopped it before would not be.
        if !vring.runs() {
            return Direct::Served;
        }
        // What was there before these were looked at may be another.
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
                tracing::warn!(queue = index, "a queue is not served from the disk: {error}");
                Direct::Impossible
            }
        }
    }

    /// Whether nothing that was taken from the queue is still to be carried out or answered.
    pub(super) fn is_idle(&mut self) -> bool {
        let is_left = self.stalled.is_some() || !self.again.is_empty();
        !is_left && self.io.tasks().reserved() == 0
    }

    /// The frontend stops the queue, or is gone. As [`finish`](Self::finish); whether the disk has
    /// nothing of it any more.
    pub(super) fn stop(&mut self, device: &DeviceShared) -> bool {
        self.finish(device);
        self.has_begun = false;
        self.tracker = None;
        // Where it is written down what is in flight, they still are.
        self.again_direct.clear();
        self.io.tasks().reserved() == 0
    }

    /// Waits until everything that was taken from the queue is answered, or [`FINISH_TIMEOUT`] is
    /// over.
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
                tracing::warn!(queue, "requests of a queue that is stopped do not end");
                // Their answers would come into memory that is not ours any more.
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

    /// The next request of those that were taken already.
    fn next_again(&mut self) -> Option<Chain> {
        self.stalled.take().or_else(|| self.again.pop_front())
    }

    /// Takes what is new, begins with it, answers what is done; until there is nothing left to do
    /// but to wait.
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
        // The queue said that there is a request.
        let mut promised = false;
        loop {
            // What was taken is answered, whether it does or not.
            let runs = vring.runs();
            if runs {
                vring.disable_notification()?;
            }
            let mut any = self.take(device, vring);
            any |= self.collect(device, vring);
            self.notify(vring);
            // A guest that asks faster than it is answered would keep us here.
            let is_over = device.check_over().is_err() || !vring.get_ref().get_queue().ready();
            if is_over || self.has_lost_memory(device) {
                return Ok(());
            }
            if any {
                promised = false;
                continue;
            }
            // Without a request in flight, nothing wakes this thread for the one that waits.
            let is_stuck = self.stalled.is_some() && self.held.pieces == 0;
            if is_stuck || device.touches.must_wait() {
                if self.io.prepare_sleep() {
                    self.io.wait(Some(Instant::now() + LOOK), |_| {});
                }
                continue;
            }
            // The guest need not notify of new requests while the queue is polled.
            if self.io.spin() {
                continue;
            }
            // With a request that waits for a slot, a notification would be of no use.
            if runs && self.stalled.is_none() && vring.enable_notification()? {
                // An index that is no queue's can promise requests for ever.
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

    /// Takes requests from the queue, if it runs, as many as there are slots for. Whether there was
    /// any.
    fn take(&mut self, device: &DeviceShared, vring: &Ring) -> bool {
        if device.touches.must_wait() {
            return false;
        }
        let memory = vring.memory();
        let mut any = false;
        // No more than there can be, whatever the guest does to its ring meanwhile.
        for _ in 0..QUEUE_SIZE {
            let chain = match self.next_again() {
                Some(chain) => chain,
                None => {
                    let mut state = vring.get_mut();
                    // While this is held, nobody can say that it is not.
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

    /// Begins with a request, or gives it back if there is no slot for it.
    fn begin(&mut self, device: &DeviceShared, vring: &Ring, chain: Chain) -> Option<Chain> {
        let size = measure(&chain);
        let Size { bytes, pieces } = self.held;
        let is_full = bytes + size.bytes > MAX_HELD
            || pieces.saturating_add(size.pieces) > device.touches.most_in_flight();
        if pieces > 0 && is_full || device.touches.must_wait() {
            return Some(chain);
        }
        let Some(slot) = self.io.tasks().reserve() else { return Some(chain) };
        let parsed = parse(&chain, &device.rules(), &device.id, size);
        device.touches.add(size.pieces);
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

    /// Submits what was begun with, and answers what is done. Whether there was anything.
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
            device.touches.add(pending.size.pieces);
        });
        *answered |= !done.is_empty();
        done.drain(..).for_each(|slot| io.tasks().release(slot));
        busy
    }

    /// Whether the guest's memory is not there any more.
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

    /// Notifies the guest of new answers, if it wants that.
    fn notify(&mut self, vring: &Ring) {
        // When in doubt, it is notified.
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
        tracing::debug!(queue, "the guest's queue makes no sense: {error}");
    } else {
        tracing::warn!(queue, "the guest's queue makes no sense: {error}");
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
