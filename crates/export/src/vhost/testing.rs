//! Queue of the device without a socket and without a thread. Only for the fuzz targets of this
//! workspace.

use super::config::feature;
use super::inflight::{Region as InflightRegion, Shape};
use super::memory::{Current, Memory, guard, is_poisoned};
use super::page_table_quota::PageTableQuota;
use super::queue::{BlkQueue, Served};
use super::request::QUEUE_SIZE;
use super::ring::Ring;
use super::serve::{ServedQueue, carry_out};
use super::shared::DeviceShared;
use ::shadowbell_memory::EventFd;
use parking_lot::RwLock;
use shadowbell_block::BlockDevice;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use vhost_user_backend::VringT;
use virtio_queue::QueueT;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryAtomic, GuestRegionMmap, MmapRegion};

/// Region of a guest's memory.
#[derive(Debug)]
pub struct Region {
    /// Guest address.
    pub address: u64,
    /// Length in bytes.
    pub len: usize,
    /// File of the region.
    pub file: File,
    /// Offset in the file in bytes.
    pub offset: u64,
}

/// Location of a queue in the guest's memory.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Number of entries.
    pub entries: u16,
    /// Address of the descriptor table.
    pub descriptors: u64,
    /// Address of the available ring.
    pub available: u64,
    /// Address of the used ring.
    pub used: u64,
}

/// Queue, with the shared state of its device.
pub struct Queue {
    disk: BlockDevice,
    queue: BlkQueue,
    device: DeviceShared,
    memory: Current,
    ring: Ring,
    waker: EventFd,
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

impl Queue {
    /// Creates the first queue of a device for `disk`, without guest memory.
    ///
    /// # Errors
    /// The error of the system call if the process is out of descriptors.
    pub fn new(disk: &BlockDevice, id: &str) -> io::Result<Self> {
        let memory: Current = GuestMemoryAtomic::new(Memory::new());
        let (socket, _) = UnixStream::pair()?;
        let device = DeviceShared {
            geometry: *disk.geometry(),
            id: id.as_bytes().to_vec(),
            memory: RwLock::new(Some(memory.clone())),
            page_table_quota: PageTableQuota::new(1),
            acked: AtomicU64::new(feature::FLUSH),
            inflight: Arc::default(),
            failures: Arc::default(),
            socket,
            over: AtomicBool::new(false),
            ending: Arc::default(),
            changes: AtomicU64::new(0),
        };
        let ring = Ring::new(memory.clone(), QUEUE_SIZE as u16).map_err(io::Error::other)?;
        let disk = disk.clone();
        let waker = EventFd::new()?;
        Ok(Self { queue: BlkQueue::new(&disk, 0), disk, device, memory, ring, waker })
    }

    /// Replaces the guest's memory. The counterpart of a frontend's message.
    ///
    /// # Errors
    ///
    /// If the regions are invalid or cannot be mapped.
    pub fn set_memory(&mut self, regions: Vec<Region>) -> io::Result<()> {
        let regions = regions.into_iter().map(|region| {
            let place = FileOffset::new(region.file, region.offset);
            let mapped = MmapRegion::from_file(place, region.len).map_err(io::Error::other)?;
            let region = GuestRegionMmap::new(mapped, GuestAddress(region.address));
            region.ok_or_else(|| io::ErrorKind::InvalidInput.into())
        });
        let regions = regions.collect::<io::Result<Vec<_>>>()?;
        let memory = Memory::from_regions(regions).map_err(io::Error::other)?;
        let lock = self.memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        lock.replace(memory);
        guard(&self.memory)
    }

    /// Sets the in-flight tracking memory, which the queue uses from its next start on. `file` is
    /// memory for `entries` descriptors.
    ///
    /// # Errors
    ///
    /// If the file cannot be mapped.
    pub fn track(&mut self, file: impl AsFd, entries: u16) -> io::Result<()> {
        let shape = Shape { len: u64::MAX, offset: 0, queues: 1, entries };
        let region = InflightRegion::map(file, shape).map_err(io::Error::other)?;
        self.device.inflight.set(region);
        Ok(())
    }

    /// Simulates the death of the process after all requests were answered. The next process has
    /// the queue at the same guest addresses.
    ///
    /// # Errors
    ///
    /// The error of the system call if the process is out of descriptors.
    pub fn replace(&mut self) -> io::Result<()> {
        self.queue.stop();
        self.queue = BlkQueue::new(&self.disk, 0);
        if let Ok(used) = self.ring.queue_used_idx() {
            self.ring.set_queue_next_used(used);
            self.ring.set_queue_next_avail(used);
        }
        Ok(())
    }

    /// Starts the queue at `place`.
    ///
    /// # Errors
    /// If an address is invalid.
    pub fn start(&mut self, place: Place, event_idx: bool, flush: bool) -> io::Result<()> {
        self.device.acked.store(if flush { feature::FLUSH } else { 0 }, Ordering::Relaxed);
        self.ring.set_queue_ready(false);
        self.queue.stop();
        self.ring.set_queue_size(place.entries);
        self.ring.set_queue_next_avail(0);
        self.ring.set_queue_next_used(0);
        self.ring.set_queue_event_idx(event_idx);
        let Place { descriptors, available, used, .. } = place;
        self.ring.set_queue_info(descriptors, available, used).map_err(io::Error::other)?;
        self.ring.set_queue_ready(true);
        self.ring.set_enabled(true);
        Ok(())
    }

    /// Sets the eventfd that interrupts the guest.
    pub fn set_call(&mut self, event: Option<EventFd>) {
        let file = event.and_then(|event| OwnedFd::try_from(event).ok()).map(File::from);
        self.ring.set_call(file);
    }

    /// Simulates a notification by the guest. Executes and answers all requests of the queue.
    ///
    /// # Errors
    ///
    /// If the queue is invalid.
    pub fn serve(&mut self) -> Result<(), String> {
        if !self.ring.get_ref().get_queue().ready() {
            return Ok(());
        }
        let Self { disk, queue, device, ring, waker, .. } = self;
        let mut senseless = None;
        let served = queue.serve_by(device, ring, waker, |context, ring, table| {
            let queue = ServedQueue::new(context, ring, table, disk, carry_out)?;
            queue.run_dry(&mut |error| senseless = Some(error.to_string()));
            Ok(())
        });
        match (senseless, served) {
            (Some(error), _) => Err(error),
            (None, Served::Impossible) => Err("the queue cannot be served".to_owned()),
            (None, _) => Ok(()),
        }
    }

    /// True if a part of the guest's memory was lost.
    #[must_use]
    pub fn has_lost_memory(&self) -> bool {
        is_poisoned(&self.memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use shadowbell_block::BlockOptions;
    use shadowbell_testing::test_disk::TestDisk;

    /// The thread may have found that the queue runs just before the stop. No later change would
    /// notify the thread.
    #[test]
    fn a_queue_that_was_stopped_meanwhile_is_not_served() {
        let backing = TestDisk::new(64, 512);
        let disk = BlockDevice::new(Arc::new(backing), &BlockOptions::default()).unwrap();
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 1 << 16).unwrap();
        let mut queue = Queue::new(&disk, "a test").unwrap();
        let region = Region { address: 0, len: 1 << 16, file: file.into(), offset: 0 };
        queue.set_memory(vec![region]).unwrap();
        let place = Place { entries: 4, descriptors: 0, available: 0x1000, used: 0x2000 };
        queue.start(place, false, true).unwrap();
        let is_served = |queue: &mut Queue| {
            let mut is_served = false;
            let Queue { queue, device, ring, waker, .. } = queue;
            let outcome = queue.serve_by(device, ring, waker, |_, _, _| {
                is_served = true;
                Ok(())
            });
            assert_eq!(outcome, Served::UntilChange);
            is_served
        };
        assert!(is_served(&mut queue));
        queue.ring.set_enabled(false);
        assert!(!is_served(&mut queue));
        queue.ring.set_enabled(true);
        assert!(is_served(&mut queue));
        queue.ring.set_queue_ready(false);
        assert!(!is_served(&mut queue));
    }
}
