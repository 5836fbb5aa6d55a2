//! Queue of the device without a socket or a thread, only for the fuzz targets of this workspace.

use super::config::feature;
use super::inflight::{Region as InflightRegion, Shape};
use super::memory::{Current, Memory, guard, is_poisoned};
use super::page_table_quota::PageTableQuota;
use super::queue::{BlkQueue, Direct};
use super::request::QUEUE_SIZE;
use super::ring::Ring;
use super::shared::DeviceShared;
use crate::local_disk::LocalDisk;
use ::shadowbell_memory::EventFd;
use parking_lot::RwLock;
use shadowbell_backend::Disk;
use shadowbell_block::BlockDevice;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
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
            local: None,
        };
        let ring = Ring::new(memory.clone(), QUEUE_SIZE as u16).map_err(io::Error::other)?;
        let disk = disk.clone();
        Ok(Self { queue: BlkQueue::new(&disk, 0)?, disk, device, memory, ring })
    }

    /// Creates a queue like [`new`](Self::new) that executes requests directly on `local`, which
    /// backs the whole disk.
    ///
    /// # Errors
    /// The error of the system call if the process is out of descriptors.
    pub fn new_direct(disk: &BlockDevice, local: Arc<dyn Disk>, id: &str) -> io::Result<Self> {
        let mut queue = Self::new(disk, id)?;
        let local = LocalDisk { disk: local, poll: Duration::ZERO, timeout: Duration::MAX };
        if !super::direct::may_serve(&local, disk.geometry()) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        queue.device.local = Some(local);
        Ok(queue)
    }

    /// Replaces the guest's memory, as a frontend does.
    ///
    /// # Errors
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

    /// Sets the in-flight tracking memory, from the next start of the queue: a file for `entries`
    /// descriptors.
    ///
    /// # Errors
    /// If the file cannot be mapped.
    pub fn track(&mut self, file: impl AsFd, entries: u16) -> io::Result<()> {
        let shape = Shape { len: u64::MAX, offset: 0, queues: 1, entries };
        let region = InflightRegion::map(file, shape).map_err(io::Error::other)?;
        self.device.inflight.set(region);
        Ok(())
    }

    /// Simulates the death of the process after all requests are answered, and a new process with
    /// the queue at the same place.
    ///
    /// # Errors
    /// The error of the system call if the process is out of descriptors.
    pub fn replace(&mut self) -> io::Result<()> {
        self.queue.stop(&self.device);
        self.queue = BlkQueue::new(&self.disk, 0)?;
        if let Ok(used) = self.ring.queue_used_idx() {
            self.ring.set_queue_next_used(used);
            self.ring.set_queue_next_avail(used);
        }
        Ok(())
    }

    /// Starts the queue at `place`.
    ///
    /// # Errors
    /// If the place is invalid.
    pub fn start(&mut self, place: Place, event_idx: bool, flush: bool) -> io::Result<()> {
        self.device.acked.store(if flush { feature::FLUSH } else { 0 }, Ordering::Relaxed);
        self.ring.set_queue_ready(false);
        self.queue.stop(&self.device);
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

    /// Simulates a notification by the guest: executes and answers all requests of the queue.
    ///
    /// # Errors
    /// If the queue is invalid.
    pub fn serve(&mut self) -> Result<(), String> {
        self.queue.io.after_sleep(false);
        if !self.ring.get_ref().get_queue().ready() {
            return Ok(());
        }
        self.queue.vring.get_or_insert_with(|| self.ring.clone());
        let waker = self.queue.io.waker().map_err(|error| error.to_string())?;
        let mut senseless = None;
        let direct = self.queue.run_direct(&self.device, &self.ring, &waker, |queue, complain| {
            queue.run_dry(&mut |error| {
                senseless = Some(error.to_string());
                complain(error);
            });
        });
        if direct != Direct::Impossible {
            return senseless.map_or(Ok(()), Err);
        }
        let served = self.queue.serve(&self.device, &self.ring);
        self.queue.finish(&self.device);
        served.map_err(|error| error.to_string())
    }

    /// True if part of the guest's memory was lost.
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
    use shadowbell_driver::AttachOptions;
    use shadowbell_testing::block_device::{TestDisk, attach};
    use std::os::unix::fs::FileExt;

    /// The thread may have seen the queue running just before the stop, and no later change would
    /// notify the thread.
    #[test]
    fn a_queue_that_was_stopped_meanwhile_is_not_served() {
        let backing = TestDisk::new(64, 512);
        let mut controller = attach(Arc::new(backing.clone()), &AttachOptions::default());
        let disk = BlockDevice::open(&mut controller, 1, &BlockOptions::default()).unwrap();
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 1 << 16).unwrap();
        let mut queue = Queue::new_direct(&disk, Arc::new(backing), "a test").unwrap();
        let region = Region { address: 0, len: 1 << 16, file: file.into(), offset: 0 };
        queue.set_memory(vec![region]).unwrap();
        let place = Place { entries: 4, descriptors: 0, available: 0x1000, used: 0x2000 };
        queue.start(place, false, true).unwrap();
        let waker = queue.queue.io.waker().unwrap();
        let is_served = |queue: &mut Queue| {
            let mut is_served = false;
            let Queue { queue, device, ring, .. } = queue;
            let outcome = queue.run_direct(device, ring, &waker, |_, _| is_served = true);
            assert_eq!(outcome, Direct::Served);
            is_served
        };
        assert!(is_served(&mut queue));
        queue.ring.set_enabled(false);
        assert!(!is_served(&mut queue));
        queue.ring.set_enabled(true);
        assert!(is_served(&mut queue));
        queue.ring.set_queue_ready(false);
        assert!(!is_served(&mut queue));
        drop((queue, disk));
        controller.detach().unwrap();
    }

    /// A request of a dead process is executed even if the guest's memory changes first such that
    /// the direct way is not possible any more.
    #[test]
    fn what_is_left_is_carried_out_whatever_becomes_of_the_memory() {
        const BYTES: usize = 1 << 16;
        // The used ring crosses a page boundary behind its first two entries.
        const USED: u64 = 0x1fe8;
        let backing = TestDisk::new(64, 512);
        let mut controller = attach(Arc::new(backing.clone()), &AttachOptions::default());
        let disk = BlockDevice::open(&mut controller, 1, &BlockOptions::default()).unwrap();
        let file = memfd_create("guest", MemfdFlags::CLOEXEC).map(File::from).unwrap();
        ftruncate(&file, BYTES as u64).unwrap();
        let region = |address: u64, len: u64| {
            let file = file.try_clone().unwrap();
            Region { address, len: len as usize, file, offset: address }
        };
        // A read of the first block, with its entry in the available ring.
        for (n, (address, len, flags, next)) in
            [(0x3000_u64, 16_u32, 1_u16, 1_u16), (0x4000, 512, 3, 2), (0x5000, 1, 2, 0)]
                .into_iter()
                .enumerate()
        {
            let descriptor = [
                &address.to_le_bytes()[..],
                &len.to_le_bytes(),
                &flags.to_le_bytes(),
                &next.to_le_bytes(),
            ];
            file.write_all_at(&descriptor.concat(), 16 * n as u64).unwrap();
        }
        file.write_all_at(&[0, 0, 1, 0, 0, 0], 0x1000).unwrap();
        file.write_all_at(&[0xff], 0x5000).unwrap();
        let tracked = memfd_create("tracked", MemfdFlags::CLOEXEC).map(File::from).unwrap();
        ftruncate(&tracked, 4096).unwrap();
        tracked.write_all_at(&[1_u16, 4, 0, 0].map(u16::to_ne_bytes).concat(), 8).unwrap();
        tracked.write_all_at(&[1], 16).unwrap();

        let mut queue = Queue::new_direct(&disk, Arc::new(backing), "a test").unwrap();
        queue.set_memory(vec![region(0, BYTES as u64)]).unwrap();
        queue.track(&tracked, 4).unwrap();
        let place = Place { entries: 4, descriptors: 0, available: 0x1000, used: USED };
        queue.start(place, false, true).unwrap();
        let waker = queue.queue.io.waker().unwrap();
        let Queue { queue: blk, device, ring, .. } = &mut queue;
        assert_eq!(blk.run_direct(device, ring, &waker, |_, _| {}), Direct::Served);
        let halves = vec![region(0, 0x2000), region(0x2000, BYTES as u64 - 0x2000)];
        queue.set_memory(halves).unwrap();
        queue.serve().unwrap();
        let at = |offset: u64| {
            let mut byte = [0];
            file.read_exact_at(&mut byte, offset).unwrap();
            byte[0]
        };
        assert_eq!((at(USED + 2), at(0x5000)), (1, 0), "answers, status");
        drop((queue, disk));
        controller.detach().unwrap();
    }
}
