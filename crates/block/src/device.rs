//! Block device with byte granularity on an NVMe namespace.

use crate::buffers::Buffers;
use crate::error::{BlockError, OpenError};
use crate::extents::Extent;
use crate::geometry::Geometry;
use crate::in_flight::Abandoned;
use crate::operations::Zeroes;
use crate::options::BlockOptions;
use crate::shared::{DeviceQueue, DeviceShared, Handle};
use crate::status::BlockStatus;
use crate::{copy, extents, operations};
use shadowbell_driver::{AsyncQueue, Controller};
use shadowbell_spec::feature::{Select, fid};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// A namespace as a block device with byte granularity. A clone is another handle to the same disk.
///
/// A handle uses one of the disk's queues: see [`on_queue`](Self::on_queue). When the last handle
/// and the last future are dropped, the queue pairs that [`open`](Self::open) took are deleted.
#[derive(Clone)]
pub struct BlockDevice(Handle);

impl BlockDevice {
    /// Opens namespace `nsid` with all queue pairs of `controller` that were not taken yet.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(
        controller: &mut Controller,
        nsid: u32,
        options: &BlockOptions,
    ) -> Result<Self, OpenError> {
        let mut queues = Vec::new();
        while let Some(queue) = controller.take_queue_pair() {
            queues.push(AsyncQueue::start(queue).map_err(OpenError::Start)?);
        }
        Self::over(controller, &queues, nsid, options)
    }

    /// Opens namespace `nsid` with existing queues of `controller`, which can be shared with
    /// others.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn over(
        controller: &Controller,
        queues: &[AsyncQueue],
        nsid: u32,
        options: &BlockOptions,
    ) -> Result<Self, OpenError> {
        let device = || controller.name().to_owned();
        let namespace = controller
            .namespace(nsid)
            .ok_or_else(|| OpenError::NoNamespace { nsid, device: device() })?;
        if let Some(what) = namespace.unusable() {
            return Err(OpenError::Unusable { nsid, what });
        }
        if queues.is_empty() {
            return Err(OpenError::NoQueue { device: device() });
        }
        let block = namespace.block_size() as usize;
        let most = usize::try_from(namespace.max_transfer_bytes()).unwrap_or(usize::MAX);
        let whole = |bytes: usize| (bytes.min(most) / block).max(1) * block;
        let mut device_queues = Vec::with_capacity(queues.len());
        for queue in queues {
            let small = match options.small_buffers {
                0 => queue.capacity(),
                count => count,
            };
            device_queues.push(DeviceQueue {
                disk: queue.open(namespace),
                small: Buffers::new(controller.buffers(small, whole(4096))?),
                large: Buffers::new(
                    controller.buffers(options.chunks, whole(options.chunk_bytes))?,
                ),
            });
        }
        let geometry = Geometry::of(namespace, options.read_only);
        let shared = DeviceShared {
            queues: device_queues,
            geometry,
            window: options.window.max(1),
            locks: Arc::default(),
            abandoned: Abandoned::new(),
            write_zeroes: AtomicBool::new(geometry.write_zeroes),
            copy: AtomicBool::new(geometry.copy),
            // Holes can be reported only if deallocated blocks read as zeroes.
            status: BlockStatus::new(namespace.identity().dlfeat.drb() == 1),
            admin: controller.admin(),
        };
        Ok(Self(Handle { shared: Arc::new(shared), queue: 0 }))
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.0
    }

    /// Size and features of the disk.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    /// The number of queues.
    #[must_use]
    pub fn queues(&self) -> usize {
        self.0.shared.queues.len()
    }

    /// Creates a handle that uses queue number `queue` modulo the number of queues. Threads should
    /// use separate queues.
    #[must_use]
    pub fn on_queue(&self, queue: usize) -> Self {
        let count = self.0.shared.queues.len().max(1);
        Self(Handle { shared: Arc::clone(&self.0.shared), queue: queue % count })
    }

    /// The queue of this handle, to be driven (see [`shadowbell_driver::async_queue`]) while
    /// waiting for futures of this disk.
    #[must_use]
    pub fn queue(&self) -> Option<&AsyncQueue> {
        Some(self.0.queue().ok()?.disk.queue())
    }

    /// True if the volatile write cache is enabled; `None` if the controller has none (Base 2.1,
    /// "Volatile Write Cache", feature 06h). Blocks until an admin command completes.
    ///
    /// # Errors
    /// [`BlockError::Admin`].
    pub fn write_cache(&self) -> Result<Option<bool>, BlockError> {
        if !self.0.geometry().volatile_cache {
            return Ok(None);
        }
        let value =
            self.0.shared.admin.get_feature(fid::VOLATILE_WRITE_CACHE, 0, Select::Current)?;
        Ok(Some(value & 1 != 0))
    }

    /// Enables or disables the controller's volatile write cache, for all of its namespaces.
    /// Without the cache, a write is durable when it completes. Blocks until an admin command
    /// completes.
    ///
    /// # Errors
    /// [`BlockError::Unsupported`] if the controller has no cache; [`BlockError::Admin`].
    pub fn set_write_cache(&self, enabled: bool) -> Result<(), BlockError> {
        if !self.0.geometry().volatile_cache {
            return Err(BlockError::Unsupported { command: "Set Features, Volatile Write Cache" });
        }
        self.0.shared.admin.set_feature(fid::VOLATILE_WRITE_CACHE, 0, enabled.into())?;
        Ok(())
    }

    /// Reads the bytes from `offset` on into all of `into`.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        operations::read(&self.0, offset, into).await
    }

    /// Writes all of `from` to the bytes from `offset` on. With `fua`, the bytes are durable when
    /// the write completes.
    ///
    /// # Errors
    /// [`BlockError`]; some of the bytes may have been written.
    pub async fn write(&self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        operations::write(&self.0, offset, from, fua).await
    }

    /// Zeroes `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`BlockError`]; some of the bytes may have been zeroed.
    pub async fn write_zeroes(&self, offset: u64, len: u64, how: Zeroes) -> Result<(), BlockError> {
        operations::write_zeroes(&self.0, offset, len, how).await
    }

    /// Deallocates the whole blocks within `len` bytes from `offset` on; partial blocks at the ends
    /// remain unchanged. The controller chooses what deallocated blocks read as.
    ///
    /// # Errors
    /// [`BlockError::Unsupported`] if the controller has no Dataset Management command; other
    /// errors.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        operations::discard(&self.0, offset, len).await
    }

    /// True if the bytes from `offset` on are equal to `with`.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn compare(&self, offset: u64, with: &[u8]) -> Result<bool, BlockError> {
        operations::compare(&self.0, offset, with).await
    }

    /// Reports which of `len` bytes from `offset` on may hold data, as contiguous extents: at least
    /// one unless the range is empty, at most `most`. They may cover only the beginning of the
    /// range.
    ///
    /// Bytes that were written before the request are reported as data, unless they were discarded
    /// or zeroed since. Concurrent changes may be reported or not. Everything is reported as data
    /// if the controller does not report allocated blocks (Get LBA Status, NVM 1.1, 4.2.1), does
    /// not specify that deallocated blocks read as zeroes, or does not answer in time.
    ///
    /// # Errors
    /// [`BlockError::OutOfRange`].
    pub async fn extents(
        &self,
        offset: u64,
        len: u64,
        most: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        self.0.range(offset, len)?;
        Ok(extents::extents(&self.0, offset, len, most).await)
    }

    /// Makes all completed writes durable, of any queue.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn flush(&self) -> Result<(), BlockError> {
        operations::flush(&self.0).await
    }

    /// Copies `len` bytes from `from` to `to`. The ranges may overlap: afterwards the destination
    /// has the previous content of the source.
    ///
    /// If source and destination have the same offset in a block, the controller itself copies
    /// whole blocks, if it supports Copy ([`Geometry::copy`]); other bytes are read and written.
    /// Concurrent writes to the source take effect before or after the copy of each block, as with
    /// a read. For concurrent requests, the destination is written.
    ///
    /// Source and destination of each Copy command do not overlap, so that the driver may submit
    /// the command again if its completion is lost.
    ///
    /// # Errors
    /// [`BlockError`]. Some of the bytes may have been copied; if source and destination overlap, a
    /// part of the source may be overwritten.
    pub async fn copy(&self, from: u64, to: u64, len: u64) -> Result<(), BlockError> {
        copy::copy(&self.0, from, to, len).await
    }
}

impl fmt::Debug for BlockDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockDevice")
            .field("geometry", self.0.geometry())
            .field("queues", &self.queues())
            .field("queue", &self.0.queue)
            .finish_non_exhaustive()
    }
}
