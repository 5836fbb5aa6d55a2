//! A namespace as a disk of bytes.

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

/// A namespace as a disk of bytes. A clone is another handle on the same disk.
///
/// A handle uses one of the disk's queues: see [`on_queue`](Self::on_queue). When the last handle
/// and the last future are dropped, the queue pairs that [`open`](Self::open) took are deleted.
#[derive(Clone)]
pub struct BlockDevice(Handle);

impl BlockDevice {
    /// Namespace `nsid` as a disk, on every queue pair that `controller` still has.
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

    /// Namespace `nsid` as a disk, on queues of `controller` that others may use as well.
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
            // What is not allocated can only be skipped if it is known what it reads as.
            status: BlockStatus::new(namespace.identity().dlfeat.drb() == 1),
            admin: controller.admin(),
        };
        Ok(Self(Handle { shared: Arc::new(shared), queue: 0 }))
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.0
    }

    /// What the disk is and can do.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        self.0.geometry()
    }

    /// How many queues there are.
    #[must_use]
    pub fn queues(&self) -> usize {
        self.0.shared.queues.len()
    }

    /// A handle that uses another of the disk's queues: `queue`, modulo their number. A thread had
    /// best have a queue of its own.
    #[must_use]
    pub fn on_queue(&self, queue: usize) -> Self {
        let count = self.0.shared.queues.len().max(1);
        Self(Handle { shared: Arc::clone(&self.0.shared), queue: queue % count })
    }

    /// The queue that this handle uses, to be driven (see
    /// [`shadowbell_driver::async_queue`]) while waiting for futures of this disk.
    #[must_use]
    pub fn queue(&self) -> Option<&AsyncQueue> {
        Some(self.0.queue().ok()?.disk.queue())
    }

    /// Whether the volatile write cache is in use; `None` if the controller has none (Base 2.1,
    /// "Volatile Write Cache", feature 06h). Waits for a command of the control plane.
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

    /// Turns the controller's volatile write cache on or off, for all of its namespaces. With the
    /// cache off, a write is durable when it completes. Waits for a command of the control plane.
    ///
    /// # Errors
    /// [`BlockError::Unsupported`] if there is no cache, [`BlockError::Admin`].
    pub fn set_write_cache(&self, enabled: bool) -> Result<(), BlockError> {
        if !self.0.geometry().volatile_cache {
            return Err(BlockError::Unsupported { command: "Set Features, Volatile Write Cache" });
        }
        self.0.shared.admin.set_feature(fid::VOLATILE_WRITE_CACHE, 0, enabled.into())?;
        Ok(())
    }

    /// Fills `into` with the bytes from `offset` on.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        operations::read(&self.0, offset, into).await
    }

    /// Writes the bytes of `from` from `offset` on; with `fua`, they are durable when this
    /// completes.
    ///
    /// # Errors
    /// [`BlockError`]. Some of the bytes may be written then.
    pub async fn write(&self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        operations::write(&self.0, offset, from, fua).await
    }

    /// Makes `len` bytes from `offset` on zero.
    ///
    /// # Errors
    /// [`BlockError`]. Some of the bytes may be zero then.
    pub async fn write_zeroes(&self, offset: u64, len: u64, how: Zeroes) -> Result<(), BlockError> {
        operations::write_zeroes(&self.0, offset, len, how).await
    }

    /// Deallocates `len` bytes from `offset` on, which are not needed any more. What they read as
    /// afterwards is the controller's choice; blocks that are not covered as a whole are left
    /// alone.
    ///
    /// # Errors
    /// [`BlockError::Unsupported`] if the controller has no such command, and others.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        operations::discard(&self.0, offset, len).await
    }

    /// Whether the bytes from `offset` on are those of `with`.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn compare(&self, offset: u64, with: &[u8]) -> Result<bool, BlockError> {
        operations::compare(&self.0, offset, with).await
    }

    /// Which of `len` bytes from `offset` on may hold data: extents without gaps, at least one of a
    /// range that is not empty, at most `most`, and perhaps fewer than there are.
    ///
    /// Bytes that were written before the request count as data, unless they were discarded or
    /// zeroed since. Of what is written or discarded meanwhile it may be either. A controller that
    /// does not say which blocks are allocated (Get LBA Status, NVM 1.1, 4.2.1), or not what the
    /// others read as, has all of them for data; so has one that does not answer in time.
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

    /// Makes everything durable that was completed before, through any queue.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn flush(&self) -> Result<(), BlockError> {
        operations::flush(&self.0).await
    }

    /// Copies `len` bytes from `from` to `to`. The two may overlap: the destination holds
    /// afterwards what the source held before.
    ///
    /// Whole blocks that move by whole blocks are copied by the controller itself, if it can
    /// ([`Geometry::copy`]); everything else is read and written. Other requests on the source
    /// happen before or after, block for block, as they would with a read; to others, the
    /// destination is written.
    ///
    /// Each command copies between places that do not overlap, so that the driver may submit it
    /// again when its completion is lost.
    ///
    /// # Errors
    /// [`BlockError`]. Some of the bytes may be copied then, and of a source that overlaps the
    /// destination some may be lost.
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
