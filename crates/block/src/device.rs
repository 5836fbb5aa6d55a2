//! A namespace as a disk.

use crate::buffers::Buffers;
use crate::error::{BlockError, OpenError};
use crate::flight::Orphans;
use crate::locks::RangeLocks;
use shadowbell_driver::{Admin, AsyncNamespace, AsyncQueue, Controller, Namespace};
use shadowbell_spec::feature::{Select, fid};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What a [`BlockDevice`] may use.
#[derive(Clone, Copy, Debug)]
pub struct BlockOptions {
    /// Bytes of a large buffer, and so of the longest command: rounded to whole blocks, and not more
    /// than the controller takes.
    pub chunk_bytes: usize,
    /// Large buffers per queue.
    pub chunks: usize,
    /// Buffers per queue for requests of up to 4096 bytes (or one block, where that is more); 0 for
    /// as many as the queue takes commands.
    pub small_buffers: usize,
    /// How many commands of one long request are under way at the same time.
    pub window: usize,
    /// Refuse everything that changes the disk.
    pub read_only: bool,
}

impl Default for BlockOptions {
    /// 32 buffers of 256 KiB per queue, eight of them for one request at most.
    fn default() -> Self {
        Self { chunk_bytes: 256 << 10, chunks: 32, small_buffers: 0, window: 8, read_only: false }
    }
}

/// What a disk is and can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// How many bytes it has.
    pub bytes: u64,
    /// Bytes of a block. Requests of whole blocks are the fast ones.
    pub block_size: u32,
    /// Whether it takes no writes.
    pub read_only: bool,
    /// Whether a write may be lost with the power until a flush.
    pub volatile_cache: bool,
    /// Whether there is a Write Zeroes command; without, zeroes are written.
    pub write_zeroes: bool,
    /// Whether blocks can be discarded.
    pub discard: bool,
    /// Whether there is a Compare command; without, the data are read.
    pub compare: bool,
    /// Whether there is a Copy command; without, the data are read and written.
    pub copy: bool,
}

/// One queue, with the buffers of those who use it through this disk.
pub(crate) struct Lane {
    pub(crate) disk: AsyncNamespace,
    pub(crate) small: Arc<Buffers>,
    pub(crate) large: Arc<Buffers>,
}

pub(crate) struct Inner {
    pub(crate) lanes: Vec<Lane>,
    pub(crate) geometry: Geometry,
    pub(crate) window: usize,
    pub(crate) locks: Arc<RangeLocks>,
    pub(crate) orphans: Arc<Orphans>,
    /// The controller has a Write Zeroes command, and has not refused one yet.
    pub(crate) zeroes: AtomicBool,
    /// The same of Copy.
    pub(crate) copies: AtomicBool,
    admin: Admin,
}

/// A namespace as a disk of bytes. A clone is another handle on the same disk.
///
/// A handle uses one of the disk's queues: see [`on_queue`](Self::on_queue). When the last handle
/// and the last future are dropped, the queue pairs that [`open`](Self::open) took are deleted.
#[derive(Clone)]
pub struct BlockDevice {
    inner: Arc<Inner>,
    lane: usize,
}

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
        let mut lanes = Vec::with_capacity(queues.len());
        for queue in queues {
            let small = match options.small_buffers {
                0 => queue.capacity(),
                count => count,
            };
            lanes.push(Lane {
                disk: queue.open(namespace),
                small: Buffers::new(controller.buffers(small, whole(4096))?),
                large: Buffers::new(
                    controller.buffers(options.chunks, whole(options.chunk_bytes))?,
                ),
            });
        }
        let geometry = Geometry::of(namespace, options.read_only);
        Ok(Self {
            inner: Arc::new(Inner {
                lanes,
                geometry,
                window: options.window.max(1),
                locks: Arc::default(),
                orphans: Orphans::new(),
                zeroes: AtomicBool::new(geometry.write_zeroes),
                copies: AtomicBool::new(geometry.copy),
                admin: controller.admin(),
            }),
            lane: 0,
        })
    }

    /// What the disk is and can do.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.inner.geometry
    }

    /// How many queues there are.
    #[must_use]
    pub fn queues(&self) -> usize {
        self.inner.lanes.len()
    }

    /// The same disk through another of its queues: `queue` counts round and round. Whoever has a
    /// thread of its own had best have a queue of its own.
    #[must_use]
    pub fn on_queue(&self, queue: usize) -> Self {
        Self { inner: Arc::clone(&self.inner), lane: queue % self.inner.lanes.len().max(1) }
    }

    /// The queue that this handle uses, for who wants to drive it (see
    /// [`shadowbell_driver::async_queue`]) while waiting for futures of this disk.
    #[must_use]
    pub fn queue(&self) -> Option<&AsyncQueue> {
        self.inner.lanes.get(self.lane).map(|lane| lane.disk.queue())
    }

    pub(crate) fn inner(&self) -> &Inner {
        &self.inner
    }

    pub(crate) fn lane(&self) -> Result<&Lane, BlockError> {
        self.inner.lanes.get(self.lane).ok_or(BlockError::BuffersLost)
    }

    pub(crate) fn namespace(&self) -> Result<&Namespace, BlockError> {
        Ok(self.lane()?.disk.namespace())
    }

    /// Whether the volatile write cache is in use; `None` if the controller has none (Base 2.1,
    /// "Volatile Write Cache", feature 06h). Waits for a command of the control plane.
    ///
    /// # Errors
    /// [`BlockError::Admin`].
    pub fn write_cache(&self) -> Result<Option<bool>, BlockError> {
        if !self.inner.geometry.volatile_cache {
            return Ok(None);
        }
        let value = self.inner.admin.get_feature(fid::VOLATILE_WRITE_CACHE, 0, Select::Current)?;
        Ok(Some(value & 1 != 0))
    }

    /// Turns the controller's volatile write cache on or off, for all of its namespaces. With the
    /// cache off, a write is durable when it completes. Waits for a command of the control plane.
    ///
    /// # Errors
    /// [`BlockError::Unsupported`] if there is no cache, [`BlockError::Admin`].
    pub fn set_write_cache(&self, enabled: bool) -> Result<(), BlockError> {
        if !self.inner.geometry.volatile_cache {
            return Err(BlockError::Unsupported { command: "Set Features, Volatile Write Cache" });
        }
        self.inner.admin.set_feature(fid::VOLATILE_WRITE_CACHE, 0, enabled.into())?;
        Ok(())
    }

    /// The controller refused Write Zeroes: from now on, zeroes are written.
    pub(crate) fn forget_write_zeroes(&self) {
        if self.inner.zeroes.swap(false, Ordering::Relaxed) {
            tracing::warn!("the controller refuses Write Zeroes; zeroes are written instead");
        }
    }
}

impl Geometry {
    fn of(namespace: &Namespace, read_only: bool) -> Self {
        let has = namespace.optional_commands();
        Self {
            bytes: namespace.bytes(),
            block_size: namespace.block_size(),
            read_only: read_only || namespace.is_read_only(),
            volatile_cache: namespace.has_volatile_cache(),
            write_zeroes: has.write_zeroes(),
            discard: has.dataset_management(),
            compare: has.compare(),
            copy: namespace.copy_limits().is_some(),
        }
    }
}

impl fmt::Debug for BlockDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockDevice")
            .field("geometry", &self.inner.geometry)
            .field("queues", &self.inner.lanes.len())
            .field("queue", &self.lane)
            .finish_non_exhaustive()
    }
}
