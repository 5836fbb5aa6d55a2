//! Queue of the device without a socket and without a thread, for the fuzz targets of this
//! workspace.

use super::config::feature;
use super::device::Device;
use super::inflight::{Region as InflightRegion, Shape};
use super::memory;
use super::queue::{BlkQueue, Served};
use super::ring::{Config, Ring};
use super::serve::{ServedQueue, execute};
use ::shadowbell_memory::EventFd;
use shadowbell_block::BlockDevice;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

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

/// Queue, with its device.
pub struct Queue {
    disk: BlockDevice,
    queue: BlkQueue,
    device: Device,
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
        let (socket, _) = UnixStream::pair()?;
        let device = Device::new(disk, id, Arc::default(), (socket, Arc::default()))?;
        let (disk, queue) = (disk.clone(), BlkQueue::new(disk, 0));
        Ok(Self { disk, queue, device, ring: Ring::new()? })
    }

    /// Replaces the guest's memory, as a SET_MEM_TABLE message of a frontend does.
    ///
    /// # Errors
    ///
    /// If the regions are invalid or cannot be mapped.
    pub fn set_memory(&mut self, regions: Vec<Region>) -> io::Result<()> {
        let regions = regions.into_iter().map(|region| {
            let len = region.len as u64;
            memory::Region::map(region.file, region.offset, (region.address, len, region.address))
        });
        let regions = regions.collect::<Result<_, _>>().map_err(io::Error::other)?;
        self.device.set_memory(regions).map_err(io::Error::other)
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

    /// Simulates the death of the process after all requests were answered. The next process starts
    /// the queue at the same guest addresses.
    ///
    /// # Errors
    ///
    /// The error of the system call if the process is out of descriptors.
    pub fn replace(&mut self) -> io::Result<()> {
        self.queue.stop();
        self.queue = BlkQueue::new(&self.disk, 0);
        let used = self.ring.config().used;
        if let Some(used) = self.used_index(used) {
            self.ring.change(|config| (config.next_used, config.next_available) = (used, used));
        }
        Ok(())
    }

    fn used_index(&self, used: u64) -> Option<u16> {
        let bytes = self.device.memory().table.bytes(used.checked_add(2)?, 2)?;
        bytes.load_u16_acquire(0).map(u16::from_le)
    }

    /// Starts the queue at `place`.
    ///
    /// # Errors
    /// If an address is invalid.
    pub fn start(&mut self, place: Place, event_idx: bool, flush: bool) -> io::Result<()> {
        self.device.acked.store(if flush { feature::FLUSH } else { 0 }, Ordering::Relaxed);
        self.queue.stop();
        let Place { entries: size, descriptors, available, used } = place;
        let (ready, enabled, next_available, next_used) = (true, true, 0, 0);
        let aligned = descriptors % 16 == 0 && available % 2 == 0 && used % 4 == 0;
        if !aligned {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        self.ring.change(|config| {
            *config = Config {
                size,
                ready,
                enabled,
                event_idx,
                descriptors,
                available,
                used,
                next_available,
                next_used,
            };
        });
        Ok(())
    }

    /// Sets the eventfd that interrupts the guest.
    pub fn set_call(&mut self, event: Option<EventFd>) {
        self.ring.set_call(event);
    }

    /// Simulates a notification by the guest. Executes and answers all requests of the queue.
    ///
    /// # Errors
    ///
    /// If the queue is invalid.
    pub fn serve(&mut self) -> Result<(), String> {
        if !self.ring.config().ready {
            return Ok(());
        }
        let Self { disk, queue, device, ring } = self;
        let mut inconsistent = None;
        let served = queue.serve_by(device, ring, |context, ring, table| {
            let queue = ServedQueue::new(context, ring, table, disk, execute)?;
            queue.run_dry(&mut |error| inconsistent = Some(error.to_string()));
            Ok(())
        });
        match (inconsistent, served) {
            (Some(error), _) => Err(error),
            (None, Served::Impossible) => Err("the queue cannot be served".to_owned()),
            (None, _) => Ok(()),
        }
    }

    /// True if a part of the guest's memory was lost.
    #[must_use]
    pub fn has_lost_memory(&self) -> bool {
        self.device.memory().is_poisoned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use shadowbell_block::BlockOptions;
    use shadowbell_testing::test_disk::TestDisk;

    /// A queue may be stopped just after its thread has found that it runs. No later change would
    /// wake the thread, so it must notice the stop itself.
    #[test]
    fn a_queue_that_stops_during_a_pass_is_not_served() {
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
            let Queue { queue, device, ring, .. } = queue;
            let outcome = queue.serve_by(device, ring, |_, _, _| {
                is_served = true;
                Ok(())
            });
            assert_eq!(outcome, Served::UntilChange);
            is_served
        };
        assert!(is_served(&mut queue));
        queue.ring.change(|config| config.enabled = false);
        assert!(!is_served(&mut queue));
        queue.ring.change(|config| config.enabled = true);
        assert!(is_served(&mut queue));
        queue.ring.change(|config| config.ready = false);
        assert!(!is_served(&mut queue));
    }

    /// Data of a request may be in memory whose file the frontend has truncated. The first request
    /// after that finds the loss, and fails as well.
    #[test]
    fn no_request_in_lost_memory_succeeds() {
        const LEN: usize = 1 << 16;
        const OUT: u32 = 1;
        for kind in [0u32, OUT] {
            let disk = BlockDevice::new(Arc::new(TestDisk::new(64, 512)), &BlockOptions::default());
            let file = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, LEN as u64).unwrap();
            let map = shadowbell_memory::Mapping::from_fd(
                &file,
                0,
                LEN as u64,
                shadowbell_memory::Protection::ReadWrite,
            );
            let guest = map.unwrap().bytes();
            let shortened = file.try_clone().unwrap();
            let mut queue = Queue::new(&disk.unwrap(), "a test").unwrap();
            let region = Region { address: 0, len: LEN, file: file.into(), offset: 0 };
            queue.set_memory(vec![region]).unwrap();
            let place = Place { entries: 4, descriptors: 0, available: 0x1000, used: 0x2000 };
            queue.start(place, false, true).unwrap();
            // Descriptors of the header, the data and the status. Flags: 1 if a next descriptor
            // follows, 2 if the device writes to the memory.
            let writable = if kind == OUT { 0 } else { 2 };
            let chain = [(0x3000u64, 16u32, 1u16, 1u16), (0xc000, 512, 1 | writable, 2)];
            for (at, (address, len, flags, next)) in
                chain.into_iter().chain([(0x4000, 1, 2, 0)]).enumerate()
            {
                let mut bytes = [0; 16];
                bytes[..8].copy_from_slice(&address.to_le_bytes());
                bytes[8..12].copy_from_slice(&len.to_le_bytes());
                bytes[12..14].copy_from_slice(&flags.to_le_bytes());
                bytes[14..].copy_from_slice(&next.to_le_bytes());
                guest.write_from(at * 16, &bytes).unwrap();
            }
            guest.write_from(0x3000, &kind.to_le_bytes()).unwrap();
            guest.write_from(0x4000, &[0xff]).unwrap();
            guest.write_from(0x1002, &1u16.to_le_bytes()).unwrap();
            ftruncate(&shortened, LEN as u64 / 2).unwrap();
            queue.serve().unwrap();
            assert!(queue.has_lost_memory());
            assert_eq!(guest.read::<u8>(0x4000), Some(1), "VIRTIO_BLK_S_IOERR, kind {kind}");
        }
    }
}
