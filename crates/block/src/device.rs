//! Block device with byte granularity on a disk.

use crate::error::OpenError;
use crate::geometry::Geometry;
use crate::options::BlockOptions;
use crate::queue::BlockQueue;
use crate::shared::DeviceShared;
use crate::traffic::Traffic;
use shadowbell_disk::Disk;
use std::fmt;
use std::io;
use std::sync::Arc;

/// A disk as a block device with byte granularity. A clone is another handle to the same device.
///
/// Each thread that accesses the device opens a [`queue`](Self::queue). The queues share the locks
/// of written ranges. Therefore all users of a disk should use clones of one device, or devices
/// made of it by [`with_options`](Self::with_options).
#[derive(Clone)]
pub struct BlockDevice(Arc<DeviceShared>);

impl BlockDevice {
    /// Creates a block device on `disk`.
    ///
    /// # Errors
    /// [`OpenError`] if the disk has zones.
    pub fn new(disk: Arc<dyn Disk>, options: &BlockOptions) -> Result<Self, OpenError> {
        let info = disk.info();
        if info.zoned.is_some() {
            return Err(OpenError::Zoned { disk: disk.name() });
        }
        let (locks, queries, traffic) = Default::default();
        Ok(Self(Arc::new(DeviceShared::new(disk, options, locks, queries, traffic))))
    }

    /// Creates another block device on the same disk, with its own options and counters. The two
    /// devices share the locks of written ranges.
    #[must_use]
    pub fn with_options(&self, options: &BlockOptions) -> Self {
        let Self(shared) = self;
        let (locks, queries) = (Arc::clone(&shared.locks), Arc::clone(&shared.queries));
        let disk = Arc::clone(&shared.disk);
        Self(Arc::new(DeviceShared::new(disk, options, locks, queries, Arc::default())))
    }

    /// Creates the block device that replaces this one after a change of its disk, for example of
    /// the size. Both share the options, the counters and the locks of written ranges.
    ///
    /// # Errors
    /// [`OpenError`] if the disk has zones.
    pub fn with_disk(&self, disk: Arc<dyn Disk>) -> Result<Self, OpenError> {
        let Self(shared) = self;
        if disk.info().zoned.is_some() {
            return Err(OpenError::Zoned { disk: disk.name() });
        }
        let (locks, queries) = (Arc::clone(&shared.locks), Arc::clone(&shared.queries));
        let (options, traffic) = (&shared.options, Arc::clone(&shared.traffic));
        Ok(Self(Arc::new(DeviceShared::new(disk, options, locks, queries, traffic))))
    }

    /// The disk.
    #[must_use]
    pub fn disk(&self) -> &Arc<dyn Disk> {
        &self.0.disk
    }

    /// Size and features of the disk.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.0.geometry
    }

    /// Options with which the device was created.
    #[must_use]
    pub fn options(&self) -> &BlockOptions {
        &self.0.options
    }

    /// Number of threads that should access the device at the same time ([`BlockOptions::queues`]).
    #[must_use]
    pub fn queues(&self) -> usize {
        self.0.options.queues.max(1)
    }

    /// Counters of requests and bytes that all queues sent to the disk, and of open queues.
    #[must_use]
    pub fn traffic(&self) -> Traffic {
        self.0.traffic.sum()
    }

    /// Opens a queue for the calling thread.
    ///
    /// # Errors
    /// The error of the disk or of the memory allocation.
    pub fn queue(&self) -> io::Result<BlockQueue> {
        BlockQueue::open(&self.0)
    }
}

impl fmt::Debug for BlockDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockDevice")
            .field("disk", &self.0.disk.name())
            .field("geometry", self.geometry())
            .finish_non_exhaustive()
    }
}
