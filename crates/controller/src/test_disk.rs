//! Disk for tests, with configurable properties and without I/O.

use shadowbell_disk::{Disk, DiskInfo, Queue};
use std::io;
use std::sync::Arc;

/// Disk with a [`DiskInfo`] and no queues.
#[derive(Debug)]
pub(crate) struct TestDisk(pub(crate) DiskInfo);

impl TestDisk {
    /// Name of the disk.
    pub(crate) const NAME: &'static str = "test";

    /// Creates a writable disk with a volatile cache and discard support.
    pub(crate) fn new(blocks: u64, block_size: u32) -> Self {
        let mut info = DiskInfo::new(block_size, blocks);
        info.volatile_cache = true;
        info.discard = true;
        Self(info)
    }

    /// Creates a writable disk as a trait object.
    pub(crate) fn shared(blocks: u64, block_size: u32) -> Arc<dyn Disk> {
        Arc::new(Self::new(blocks, block_size))
    }
}

impl Disk for TestDisk {
    fn info(&self) -> DiskInfo {
        self.0.clone()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Err(io::Error::other("a test disk has no queues"))
    }

    fn name(&self) -> String {
        Self::NAME.into()
    }
}
