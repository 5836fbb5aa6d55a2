//! virtio-blk device, as a backend of rust-vmm.

use super::config;
use super::guest_region::Guarded;
use super::inflight::Kept;
use super::memory::{Current, guard, lengths};
use super::page_table_quota::PageTableQuota;
use super::queue::{BlkQueue, Served};
use super::request::QUEUE_SIZE;
use super::ring::Ring;
use super::shared::DeviceShared;
use crate::failures::FailureCount;
use ::shadowbell_memory::EventFd;
use parking_lot::{Mutex, MutexGuard, RwLock};
use shadowbell_block::BlockDevice;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use vhost::vhost_user::message::VhostUserProtocolFeatures;
use vhost_user_backend::VhostUserBackend;
use vmm_sys_util::epoll::EventSet;

/// Largest number of queues of a device.
const MAX_QUEUES: usize = 64;

/// virtio-blk device for one frontend.
pub(super) struct Device {
    queues: Vec<Mutex<BlkQueue>>,
    shared: DeviceShared,
    /// Events that end the sleep of the queues' threads, one for each queue.
    wakers: Vec<EventFd>,
}

impl Device {
    /// Creates the device for the frontend at the other end of `socket`.
    pub(super) fn new(
        disk: &BlockDevice,
        id: &str,
        failures: Arc<FailureCount>,
        (socket, ending): (UnixStream, Arc<AtomicBool>),
    ) -> io::Result<Self> {
        let count = disk.queues().min(MAX_QUEUES);
        let wakers = (0..count).map(|_| EventFd::new()).collect::<io::Result<_>>()?;
        Ok(Self {
            wakers,
            queues: (0..count).map(|index| Mutex::new(BlkQueue::new(disk, index))).collect(),
            shared: DeviceShared {
                geometry: *disk.geometry(),
                id: id.as_bytes().to_vec(),
                memory: RwLock::default(),
                page_table_quota: PageTableQuota::new(count),
                acked: AtomicU64::new(0),
                inflight: Arc::default(),
                failures,
                socket,
                over: AtomicBool::new(false),
                ending,
                changes: AtomicU64::new(0),
            },
        })
    }

    fn queue(&self, index: usize) -> Option<MutexGuard<'_, BlkQueue>> {
        Some(self.queues.get(index)?.lock())
    }

    /// Event that ends the sleep of the queue's thread.
    pub(super) fn event(&self, queue: usize) -> Option<i32> {
        Some(self.wakers.get(queue)?.as_fd().as_raw_fd())
    }

    /// Number by which the events of [`event`](Self::event) are registered.
    pub(super) fn event_number(&self) -> u64 {
        self.queues.len() as u64 + 1
    }

    /// Ends the threads of the queues. This must not depend on the guest: it shares the memory, and
    /// could keep the threads busy forever, even after its frontend has disconnected.
    pub(super) fn leave(&self) {
        self.shared.over.store(true, Ordering::SeqCst);
        self.wakers.iter().for_each(EventFd::signal);
    }

    /// Notifies the queues that the memory or the features have changed.
    fn changed(&self) {
        self.shared.changes.fetch_add(1, Ordering::SeqCst);
        self.wakers.iter().for_each(EventFd::signal);
    }

    /// Stops a queue after its thread has stopped serving it. The requests taken from the queue are
    /// answered, unless the disk does not complete them.
    pub(super) fn stop_queue(&self, index: usize) {
        if let Some(mut queue) = self.queue(index) {
            queue.stop();
        }
    }

    /// In-flight tracking memory of the queues.
    pub(super) fn inflight(&self) -> &Arc<Kept> {
        &self.shared.inflight
    }
}

impl VhostUserBackend for Device {
    type Bitmap = Guarded;
    type Vring = Ring;

    fn num_queues(&self) -> usize {
        self.queues.len()
    }

    fn max_queue_size(&self) -> usize {
        QUEUE_SIZE
    }

    fn features(&self) -> u64 {
        config::features(&self.shared.geometry)
    }

    fn acked_features(&self, features: u64) {
        self.shared.acked.store(features, Ordering::Relaxed);
        self.changed();
    }

    fn protocol_features(&self) -> VhostUserProtocolFeatures {
        VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
    }

    fn set_event_idx(&self, _: bool) {}

    fn get_config(&self, offset: u32, size: u32) -> Vec<u8> {
        let mut bytes = config::configuration(&self.shared.geometry, self.queues.len());
        let end = u64::from(offset) + u64::from(size);
        // Bytes beyond the end of the configuration space read as zeroes. rust-vmm refuses requests
        // that exceed its own limit.
        let end = usize::try_from(end).unwrap_or(usize::MAX).min(4096);
        bytes.resize(bytes.len().max(end), 0);
        bytes.get(offset as usize..end).unwrap_or_default().to_vec()
    }

    fn update_memory(&self, memory: Current) -> io::Result<()> {
        let outcome = guard(&memory).inspect_err(|error| {
            tracing::warn!("the guest's memory cannot be mapped: {error}");
        });
        self.shared.page_table_quota.memory_changed(lengths(&memory).into_iter());
        *self.shared.memory.write() = Some(memory);
        self.changed();
        outcome
    }

    fn queues_per_thread(&self) -> Vec<u64> {
        (0..self.queues.len()).map(|queue| 1 << queue).collect()
    }

    fn stop_vring(&self, queue: u32) -> io::Result<()> {
        self.stop_queue(queue as usize);
        Ok(())
    }

    fn handle_event(
        &self,
        number: u16,
        _: EventSet,
        vrings: &[Ring],
        thread: usize,
    ) -> io::Result<()> {
        self.shared.check_over()?;
        let (Some(mut queue), Some(vring)) = (self.queue(thread), vrings.first()) else {
            return Ok(());
        };
        let Some(waker) = self.wakers.get(thread) else { return Ok(()) };
        if u64::from(number) == self.event_number() {
            waker.drain();
        }
        // While nothing changes, the thread stays in this loop.
        while vring.runs() && !self.shared.is_over() {
            match queue.serve(&self.shared, vring, waker) {
                Served::UntilChange => {}
                Served::Impossible | Served::Refused => break,
            }
        }
        // The end of the session may have been signalled while the thread was awake.
        self.shared.check_over()
    }
}
