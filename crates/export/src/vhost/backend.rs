//! The device that a frontend drives: its features, its configuration, and its queues.

use super::memory::{Current, Guarded, guard, is_poisoned};
use super::request::{
    Chain, Ended, Job, MAX_DATA, Refusal, Rules, SECTOR, Status, carry_out, data_len, parse, put,
};
use super::ring::Ring;
use crate::seat::Seat;
use ::shadowbell_memory::EventFd;
use shadowbell_block::{BlockDevice, BlockError, Geometry};
use std::future::Future;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost_user_backend::{VhostUserBackend, VringT};
use virtio_queue::QueueT;
use vmm_sys_util::epoll::EventSet;

/// Requests of one queue that are under way.
const PLACES: usize = 128;
/// Entries of a queue, at most.
const QUEUE_SIZE: usize = 1024;
/// Bytes of data of one queue's requests; one request is always taken.
const MAX_HELD: usize = 64 << 20;
/// How long a queue that is stopped waits for its requests: longer than the driver waits for a
/// command unless somebody says otherwise.
const PATIENCE: Duration = Duration::from_secs(60);
/// Descriptors for data in a request, as the guest is told.
const SEG_MAX: u32 = 254;

/// Feature bits. Virtio 1.2, 5.2.3 and 6.
mod feature {
    pub(super) const SEG_MAX: u64 = 1 << 2;
    pub(super) const RO: u64 = 1 << 5;
    pub(super) const BLK_SIZE: u64 = 1 << 6;
    pub(super) const FLUSH: u64 = 1 << 9;
    pub(super) const TOPOLOGY: u64 = 1 << 10;
    pub(super) const MQ: u64 = 1 << 12;
    pub(super) const DISCARD: u64 = 1 << 13;
    pub(super) const WRITE_ZEROES: u64 = 1 << 14;
    pub(super) const INDIRECT_DESC: u64 = 1 << 28;
    pub(super) const EVENT_IDX: u64 = 1 << 29;
    /// vhost-user's own.
    pub(super) const PROTOCOL_FEATURES: u64 = 1 << 30;
    pub(super) const VERSION_1: u64 = 1 << 32;
}

type Work = Pin<Box<dyn Future<Output = Ended> + Send>>;

struct Pending {
    chain: Chain,
    held: usize,
}

/// A queue, and the thread's place that serves it.
struct Lane {
    disk: BlockDevice,
    seat: Seat<Work>,
    pending: Vec<Option<Pending>>,
    /// Kept for its capacity.
    done: Vec<usize>,
    /// There are answers that the guest was not told of.
    answered: bool,
    /// A request for which there is no place or no memory at the moment.
    stalled: Option<Chain>,
    held: usize,
    /// [`shadowbell_memory::sigbus::faults`] when it was last looked at.
    faults: u64,
    vring: Option<Ring>,
    /// That its queue makes no sense was said.
    complained: bool,
}

/// A virtio-blk device.
pub(super) struct Device {
    lanes: Vec<Mutex<Lane>>,
    geometry: Geometry,
    id: Vec<u8>,
    memory: RwLock<Option<Current>>,
    acked: AtomicU64,
    failures: Arc<AtomicU64>,
    /// The frontend's, to hang up.
    socket: UnixStream,
    /// The frontend has gone, and the threads of the queues are to end.
    over: AtomicBool,
    /// Wakes each of them.
    alarms: Vec<EventFd>,
}

impl Device {
    /// For the frontend at the other end of `socket`.
    pub(super) fn new(
        disk: &BlockDevice,
        id: &str,
        failures: Arc<AtomicU64>,
        socket: UnixStream,
    ) -> io::Result<Self> {
        let lane = |queue| {
            let disk = disk.on_queue(queue);
            Ok(Mutex::new(Lane {
                seat: Seat::new(&disk, PLACES)?,
                disk,
                pending: (0..PLACES).map(|_| None).collect(),
                done: Vec::with_capacity(PLACES),
                answered: false,
                stalled: None,
                held: 0,
                faults: ::shadowbell_memory::sigbus::faults(),
                vring: None,
                complained: false,
            }))
        };
        let lanes: Vec<_> = (0..disk.queues().min(64)).map(lane).collect::<io::Result<_>>()?;
        let alarm =
            |lane: &Mutex<Lane>| lane.lock().unwrap_or_else(PoisonError::into_inner).seat.alarm();
        Ok(Self {
            alarms: lanes.iter().map(alarm).collect::<io::Result<_>>()?,
            over: AtomicBool::new(false),
            lanes,
            geometry: *disk.geometry(),
            id: id.as_bytes().to_vec(),
            memory: RwLock::default(),
            acked: AtomicU64::new(0),
            failures,
            socket,
        })
    }

    fn lane(&self, index: usize) -> Option<MutexGuard<'_, Lane>> {
        Some(self.lanes.get(index)?.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The descriptor on which the lane's requests are announced when they are done.
    pub(super) fn event(&self, lane: usize) -> Option<i32> {
        Some(self.lane(lane)?.seat.as_fd().as_raw_fd())
    }

    /// The number by which that descriptor's events are known.
    pub(super) fn event_number(&self) -> u64 {
        self.lanes.len() as u64 + 1
    }

    /// Ends the threads of the queues. Their guest has shared its memory, and may go on without the
    /// frontend for ever.
    pub(super) fn leave(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.alarms.iter().for_each(EventFd::signal);
    }

    /// An error, which ends a queue's thread, if it is to end. rust-vmm has a descriptor for that, and
    /// does not close it.
    fn check_over(&self) -> io::Result<()> {
        if self.over.load(Ordering::SeqCst) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    fn rules(&self) -> Rules {
        let acked = self.acked.load(Ordering::Relaxed);
        let write_through = self.geometry.volatile_cache && acked & feature::FLUSH == 0;
        Rules { geometry: self.geometry, write_through }
    }

    /// Waits until everything that was taken from the queue is answered, or [`PATIENCE`] is over.
    pub(super) fn finish(&self, index: usize) {
        let Some(mut lane) = self.lane(index) else { return };
        let Some(vring) = lane.vring.clone() else { return };
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut any = false;
            while let Some(chain) = lane.stalled.take() {
                if let Some(chain) = self.begin(&mut lane, &vring, chain) {
                    lane.stalled = Some(chain);
                    break;
                }
                any = true;
            }
            any |= self.collect(&mut lane, &vring);
            lane.signal(&vring);
            if lane.seat.tasks().reserved() == 0 && lane.stalled.is_none() {
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                tracing::warn!(queue = index, "requests of a queue that is stopped do not end");
                // Their answers would come into memory that is not ours any more.
                lane.pending.iter_mut().for_each(|pending| *pending = None);
                (lane.stalled, lane.held) = (None, 0);
                return;
            }
            if !any && lane.seat.prepare_sleep() {
                lane.seat.wait(Some(deadline), |_| {});
            }
        }
    }

    /// Takes what is new, begins with it, answers what is done; until there is nothing left to do
    /// but to wait.
    fn serve(&self, lane: &mut Lane, vring: &Ring) -> Result<(), virtio_queue::Error> {
        // The queue said that there is a request.
        let mut promised = false;
        loop {
            vring.disable_notification()?;
            let mut any = self.take(lane, vring);
            any |= self.collect(lane, vring);
            lane.signal(vring);
            // A guest that asks faster than it is answered would keep us here.
            let is_over = self.check_over().is_err() || !vring.get_ref().get_queue().ready();
            if is_over || self.has_lost_memory(lane) {
                return Ok(());
            }
            if any {
                promised = false;
                continue;
            }
            // The guest need not tell of new requests while we look for ourselves.
            if lane.seat.spin() {
                continue;
            }
            // With a request that waits for a place, there is nothing to be told of.
            if lane.stalled.is_none() && vring.enable_notification()? {
                // An index that is no queue's can promise requests for ever.
                if std::mem::replace(&mut promised, true) {
                    return Err(virtio_queue::Error::InvalidAvailRingIndex);
                }
                continue;
            }
            if lane.seat.prepare_timed_sleep() {
                return Ok(());
            }
        }
    }

    /// Takes requests from the queue, as many as there are places for. Whether there was any.
    fn take(&self, lane: &mut Lane, vring: &Ring) -> bool {
        let memory = vring.memory();
        let mut any = false;
        // No more than there can be, whatever the guest does to its ring meanwhile.
        for _ in 0..QUEUE_SIZE {
            let next = lane
                .stalled
                .take()
                .or_else(|| vring.get_mut().get_queue_mut().pop_descriptor_chain(memory.clone()));
            let Some(chain) = next else { break };
            if let Some(chain) = self.begin(lane, vring, chain) {
                lane.stalled = Some(chain);
                break;
            }
            any = true;
        }
        any
    }

    /// Begins with a request, or gives it back if there is no place for it.
    fn begin(&self, lane: &mut Lane, vring: &Ring, chain: Chain) -> Option<Chain> {
        let held = data_len(&chain);
        if lane.held > 0 && lane.held + held > MAX_HELD {
            return Some(chain);
        }
        let Some(place) = lane.seat.tasks().reserve() else { return Some(chain) };
        match parse(&chain, &self.rules(), &self.id, held) {
            Ok(job) => {
                lane.held += held;
                lane.seat.tasks().start(place, work(lane.disk.clone(), job));
                if let Some(pending) = lane.pending.get_mut(place) {
                    *pending = Some(Pending { chain, held });
                }
            }
            Err(refusal) => {
                lane.seat.tasks().release(place);
                let len = match refusal {
                    Refusal::Status(status) => put(&chain, &[], status),
                    Refusal::NoRoom => 0,
                };
                answer(vring, &chain, len);
                lane.answered = true;
            }
        }
        None
    }

    /// Submits what was begun with, and answers what is done. Whether there was anything.
    fn collect(&self, lane: &mut Lane, vring: &Ring) -> bool {
        let Lane { seat, pending, held, done, answered, .. } = lane;
        let busy = seat.turn(|place, ended| {
            done.push(place);
            let Some(pending) = pending.get_mut(place).and_then(Option::take) else { return };
            *held = held.saturating_sub(pending.held);
            let Ended { outcome, data, for_guest } = ended;
            let status = match &outcome {
                Ok(()) => Status::Ok,
                Err(BlockError::Unsupported { .. }) => Status::Unsupported,
                Err(error) => {
                    self.failed(error);
                    Status::IoError
                }
            };
            let data = if for_guest && outcome.is_ok() { data.as_slice() } else { &[] };
            answer(vring, &pending.chain, put(&pending.chain, data, status));
        });
        *answered |= !done.is_empty();
        done.drain(..).for_each(|place| seat.tasks().release(place));
        busy
    }

    /// Whether the guest's memory is not there any more: what is in its place is nobody's. Then its
    /// frontend is hung up on.
    fn has_lost_memory(&self, lane: &mut Lane) -> bool {
        let faults = ::shadowbell_memory::sigbus::faults();
        if faults == lane.faults {
            return false;
        }
        let memory = self.memory.read().unwrap_or_else(PoisonError::into_inner);
        let lost = memory.as_ref().is_some_and(is_poisoned);
        if lost {
            tracing::error!(
                "memory of the guest is gone (its file was truncated, or there are no huge pages for \
                 it), so its frontend is sent away"
            );
            let _ = self.socket.shutdown(Shutdown::Both);
        } else {
            lane.faults = faults;
        }
        lost
    }

    fn failed(&self, error: &BlockError) {
        if self.failures.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::error!("a request failed, and further failures are only counted: {error}");
        }
    }

    /// `struct virtio_blk_config`. Virtio 1.2, 5.2.4.
    fn configuration(&self) -> Vec<u8> {
        let block = self.geometry.block_size;
        let sectors = u32::try_from(MAX_DATA as u64 * 16 / SECTOR).unwrap_or(u32::MAX);
        let alignment = block / SECTOR as u32;
        let queues = u16::try_from(self.lanes.len()).unwrap_or(u16::MAX);
        let mut out = Vec::with_capacity(60);
        out.extend((self.geometry.bytes / SECTOR).to_le_bytes());
        out.extend(0u32.to_le_bytes()); // size_max: not offered
        out.extend(SEG_MAX.to_le_bytes());
        out.extend([0; 4]); // geometry: not offered
        out.extend(block.to_le_bytes());
        // Topology: one logical block per physical one, and pages of 4096 bytes are best.
        out.extend([0, 0]);
        out.extend(u16::try_from(4096 / block.min(4096)).unwrap_or(1).to_le_bytes());
        out.extend(0u32.to_le_bytes());
        out.extend([0, 0]); // writeback: not offered
        out.extend(queues.to_le_bytes());
        for word in [sectors, 1, alignment, sectors, 1] {
            out.extend(word.to_le_bytes());
        }
        out.extend([1, 0, 0, 0]); // write_zeroes_may_unmap
        out
    }
}

fn work(disk: BlockDevice, job: Job) -> Work {
    Box::pin(carry_out(disk, job))
}

fn answer(vring: &Ring, chain: &Chain, len: u32) {
    if let Err(error) = vring.add_used(chain.head_index(), len) {
        tracing::warn!("an answer does not fit into the guest's queue: {error}");
    }
}

impl Lane {
    /// Tells the guest of new answers, if it wants to be told.
    fn signal(&mut self, vring: &Ring) {
        // When in doubt, it is told.
        if std::mem::take(&mut self.answered)
            && vring.needs_notification().unwrap_or(true)
            && let Err(error) = vring.signal_used_queue()
        {
            tracing::debug!("the guest could not be told of answers: {error}");
        }
    }
}

impl VhostUserBackend for Device {
    type Bitmap = Guarded;
    type Vring = Ring;

    fn num_queues(&self) -> usize {
        self.lanes.len()
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        let mut features = feature::SEG_MAX
            | feature::BLK_SIZE
            | feature::TOPOLOGY
            | feature::FLUSH
            | feature::MQ
            | feature::INDIRECT_DESC
            | feature::EVENT_IDX
            | feature::PROTOCOL_FEATURES
            | feature::VERSION_1;
        if self.geometry.read_only {
            features |= feature::RO;
        } else {
            features |= feature::WRITE_ZEROES;
            if self.geometry.discard {
                features |= feature::DISCARD;
            }
        }
        features
    }

    fn acked_features(&self, features: u64) {
        self.acked.store(features, Ordering::Relaxed);
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
    }

    fn set_event_idx(&self, _: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut bytes = self.configuration();
        let end = u64::from(offset) + u64::from(size);
        // What is behind the end reads as zeroes; more than the protocol allows is refused by it.
        let end = usize::try_from(end).unwrap_or(usize::MAX).min(4096);
        bytes.resize(bytes.len().max(end), 0);
        bytes.get(offset as usize..end).unwrap_or_default().to_vec()
    }

    fn update_memory(&self, memory: Current) -> io::Result<()> {
        let outcome = guard(&memory).inspect_err(|error| {
            tracing::warn!("the guest's memory can not be had: {error}");
        });
        *self.memory.write().unwrap_or_else(PoisonError::into_inner) = Some(memory);
        outcome
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        (0..self.lanes.len()).map(|queue| 1 << queue).collect()
    }

    fn stop_vring(&self, queue: u32) -> io::Result<()> {
        self.finish(queue as usize);
        Ok(())
    }

    fn handle_event(
        &self,
        number: u16,
        _: EventSet,
        vrings: &[Ring],
        thread: usize,
    ) -> io::Result<()> {
        self.check_over()?;
        let (Some(mut lane), Some(vring)) = (self.lane(thread), vrings.first()) else {
            return Ok(());
        };
        // Whatever it is that happened, everything is looked at.
        if u64::from(number) == self.event_number() {
            lane.seat.look();
        } else {
            lane.seat.awake(false);
        }
        if lane.vring.is_none() {
            lane.vring = Some(vring.clone());
        }
        if !vring.get_ref().get_queue().ready() {
            return Ok(());
        }
        if let Err(error) = self.serve(&mut lane, vring) {
            // An error here would end the thread, and with it the queue for good.
            if std::mem::replace(&mut lane.complained, true) {
                tracing::debug!(queue = thread, "the guest's queue makes no sense: {error}");
            } else {
                tracing::warn!(queue = thread, "the guest's queue makes no sense: {error}");
            }
        }
        // What woke it may have come while it was awake.
        self.check_over()
    }
}
