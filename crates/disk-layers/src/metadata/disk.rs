//! Layer that adds metadata to the blocks of a disk.

use super::cache::Cache;
use super::layout::Layout;
use super::locks::Locks;
use super::queue::MetadataQueue;
use shadowbell_disk::{Disk, DiskInfo, MetadataFormat, Queue, ResizeError};
use std::io;
use std::sync::Arc;

/// Disk that stores metadata for the blocks of another disk, in the last part of that disk. The
/// size cannot change, because the positions of the metadata depend on it. The disk below must have
/// no other writer.
#[derive(Clone, Debug)]
pub struct MetadataDisk {
    inner: Arc<dyn Disk>,
    layout: Layout,
    locks: Arc<Locks>,
    cache: Arc<Cache>,
}

impl MetadataDisk {
    /// Adds metadata to `disk`, whose blocks must have none.
    ///
    /// # Errors
    /// A sentence with the reason: the disk is too small, or its blocks have metadata already.
    pub fn new(disk: Arc<dyn Disk>, format: MetadataFormat) -> Result<Self, String> {
        let info = disk.info();
        if info.metadata.is_some() {
            return Err(format!("{}: its blocks already have metadata", disk.name()));
        }
        if !matches!(info.block_size, 512 | 4096) || !format.is_possible() {
            return Err(format!("{}: its blocks cannot have such metadata", disk.name()));
        }
        let layout = Layout::new(format, info.block_size, info.bytes());
        if layout.blocks == 0 {
            return Err(format!("{}: it is too small to have metadata", disk.name()));
        }
        let all = layout.locate(0, layout.blocks);
        let blocks = (all.to - all.from) / u64::from(layout.block_size);
        let cache = Arc::new(Cache::new(layout.block_size, blocks));
        Ok(Self { inner: disk, layout, locks: Arc::default(), cache })
    }
}

impl Disk for MetadataDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            blocks: self.layout.blocks,
            metadata: Some(self.layout.format),
            ..self.inner.info()
        }
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let (queue, info) = (self.inner.queue()?, self.info());
        let (locks, cache) = (Arc::clone(&self.locks), Arc::clone(&self.cache));
        Ok(Box::new(MetadataQueue::new(queue, self.layout, &info, (locks, cache))?))
    }

    fn inner(&self) -> Option<&Arc<dyn Disk>> {
        Some(&self.inner)
    }

    fn queue_files(&self) -> u64 {
        // This layer adds an eventfd, and an epoll descriptor that merges it with the timer of the
        // inner queue.
        self.inner.queue_files() + 2
    }

    fn name(&self) -> String {
        self.inner.name()
    }

    fn resized(&self, _: Option<u64>) -> Result<Arc<dyn Disk>, ResizeError> {
        Err(ResizeError::Metadata { disk: self.name() })
    }

    fn with_writes(&self, accepted: bool) -> Result<Arc<dyn Disk>, ResizeError> {
        let inner = self.inner.with_writes(accepted)?;
        Ok(Arc::new(Self { inner, ..self.clone() }))
    }
}
