//! Disk of this process, for exports that access the disk without the driver.

use shadowbell_backend::Disk;
use shadowbell_block::Geometry;
use std::sync::Arc;
use std::time::Duration;

/// Disk of this process that backs the exported namespace.
#[derive(Clone, Debug)]
pub struct LocalDisk {
    /// Backend disk.
    pub disk: Arc<dyn Disk>,
    /// Longest time for which a queue's thread polls before it sleeps.
    pub poll: Duration,
    /// Time after which a request is cancelled.
    pub timeout: Duration,
}

impl LocalDisk {
    /// True if the disk's blocks are exactly those of the exported device, with the same
    /// durability.
    pub(crate) fn is_all_of(&self, geometry: &Geometry) -> bool {
        let info = self.disk.info();
        info.block_size == geometry.block_size
            && info.metadata.is_none()
            && info.bytes() == geometry.bytes
            && info.volatile_cache == geometry.volatile_cache
    }
}
