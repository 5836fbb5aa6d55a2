//! A disk of this process, as a device may be served from it.

use shadowbell_backend::Disk;
use shadowbell_block::Geometry;
use std::sync::Arc;
use std::time::Duration;

/// A disk of this process, which is what the exported namespace has below it.
#[derive(Clone, Debug)]
pub struct LocalDisk {
    /// The disk.
    pub disk: Arc<dyn Disk>,
    /// For how long a queue's thread polls before it sleeps, at most.
    pub poll: Duration,
    /// How long a request may take until it is cancelled.
    pub timeout: Duration,
}

impl LocalDisk {
    /// Whether its blocks are those of what is exported, and mean the same when they are written.
    pub(crate) fn is_all_of(&self, geometry: &Geometry) -> bool {
        let info = self.disk.info();
        info.block_size == geometry.block_size
            && info.metadata.is_none()
            && info.bytes() == geometry.bytes
            && info.volatile_cache == geometry.volatile_cache
    }
}
