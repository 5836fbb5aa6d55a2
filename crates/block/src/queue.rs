//! Queue of a block device, for one thread.

use crate::buffers::{Buffer, BufferPool};
use crate::engine::{Data, Engine};
use crate::error::BlockError;
use crate::extents::{self, Extent};
use crate::geometry::Geometry;
use crate::in_flight::InFlight;
use crate::locks::RangeGuard;
use crate::range::BlockRange;
use crate::shared::DeviceShared;
use shadowbell_disk::{DiskError, Op, Request};
use shadowbell_memory::{MapError, View};
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Default number of small buffers: enough for the requests of one queue.
const SMALL_BUFFERS: usize = 128;
const SMALL: usize = 4096;
/// Maximum number of blocks of a request without data. Larger ranges are split, because some disks
/// have to work on each block.
const MAX_BLOCKS: u64 = 1 << 15;

/// Queue of a [`BlockDevice`](crate::BlockDevice) for one thread, with futures for requests. A
/// clone is another handle to the same queue.
///
/// The futures make progress while the thread that created the queue calls [`turn`](Self::turn), as
/// [`block_on`](Self::block_on) does. The drop of a queue waits for its requests.
#[derive(Clone)]
pub struct BlockQueue(Rc<QueueShared>);

struct QueueShared {
    /// Fields are dropped in order: the queue is closed before its disk.
    engine: Engine,
    small: BufferPool,
    large: BufferPool,
    longest: u64,
    device: Arc<DeviceShared>,
}

impl BlockQueue {
    pub(crate) fn open(device: &Arc<DeviceShared>) -> io::Result<Self> {
        let options = &device.options;
        let mut queue = device.disk.queue()?;
        queue.may_wait();
        let block = device.geometry.block_size as usize;
        let longest = queue.longest_inline().min(MAX_BLOCKS * block as u64);
        let longest = (longest / block as u64).max(1) * block as u64;
        let whole = |bytes: usize| (bytes / block).max(1) * block;
        let pool = |count, size| BufferPool::new(count, size).map_err(io::Error::other);
        let small = match options.small_buffers {
            0 => SMALL_BUFFERS,
            count => count,
        };
        Ok(Self(Rc::new(QueueShared {
            engine: Engine::new(queue, &device.disk.info(), options.timeout, device.traffic.open()),
            small: pool(small, whole(SMALL))?,
            large: pool(options.chunks, whole(options.chunk_bytes))?,
            longest,
            device: Arc::clone(device),
        })))
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.0.engine
    }

    pub(crate) fn device(&self) -> &DeviceShared {
        &self.0.device
    }

    pub(crate) fn small(&self) -> &BufferPool {
        &self.0.small
    }

    pub(crate) fn large(&self) -> &BufferPool {
        &self.0.large
    }

    /// Size and features of the disk.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.device().geometry
    }

    /// Number of requests in flight.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.engine().pending()
    }

    /// Passes the submitted requests to the disk and takes completions. Returns true if there were
    /// completions.
    pub fn turn(&self) -> bool {
        self.engine().turn()
    }

    /// Counts a request that the caller executes on the disk's file, without this queue.
    pub fn count(&self, request: &Request) {
        self.engine().count(request);
    }

    /// Counts the end of a request that the caller has executed on the disk's file.
    pub fn count_end(&self, outcome: Result<(), DiskError>) {
        self.engine().count_end(outcome);
    }

    /// Calls `each` with each descriptor that becomes readable when [`turn`](Self::turn) has work.
    /// The second argument is true for descriptors that must be watched edge-triggered.
    ///
    /// # Errors
    /// The first error of `each`.
    pub fn watch<E>(
        &self,
        mut each: impl FnMut(BorrowedFd<'_>, bool) -> Result<(), E>,
    ) -> Result<(), E> {
        let watched = self.engine().with_queue(|queue| {
            if let Some(fd) = queue.wake_fd() {
                each(fd, queue.wakes_by_edges())?;
            }
            match queue.timer_fd() {
                Some(fd) => each(fd, false),
                None => Ok(()),
            }
        });
        watched.unwrap_or(Ok(()))
    }

    /// True if the thread may sleep: no request was submitted since the last [`turn`](Self::turn).
    #[must_use]
    pub fn may_sleep(&self) -> bool {
        self.engine().may_sleep()
    }

    /// Longest time that the thread may sleep now without missing a timeout. `None` if there is no
    /// limit.
    #[must_use]
    pub fn sleep_limit(&self) -> Option<Duration> {
        self.engine().sleep_limit()
    }

    /// Processes the end of a sleep. Must be called after the thread has slept on the descriptors
    /// of [`watch`](Self::watch).
    pub fn after_sleep(&self) {
        self.engine().after_sleep();
    }

    /// True if the disk holds requests of this queue after an error of its storage. They do not
    /// exceed the timeout, except after [`limit_holds`](Self::limit_holds).
    #[must_use]
    pub fn holds_requests(&self) -> bool {
        self.engine().holds_requests()
    }

    /// Applies the timeout to held requests as well, because no client waits for them, or because
    /// the queue is to be closed.
    pub fn limit_holds(&self) {
        self.engine().limit_holds();
    }

    /// Requests an early end of all requests in flight from the disk.
    pub fn cancel_all(&self) {
        self.engine().cancel_all();
    }

    /// Announces the memory that requests with [segments](Self::read_to) use from now on.
    pub fn memory_changed(&self, view: &View) {
        self.engine().with_queue_mut(|queue| queue.memory_changed(view));
    }

    /// True if the queue benefits from [`prefetch_hint`](Self::prefetch_hint).
    #[must_use]
    pub fn uses_prefetch_hints(&self) -> bool {
        self.engine().with_queue(|queue| queue.uses_prefetch_hints()).unwrap_or(false)
    }

    /// Hints that a request `op` will be submitted soon: see
    /// [`Queue::prefetch_hint`](shadowbell_disk::Queue::prefetch_hint).
    pub fn prefetch_hint(&self, op: Op, offset: u64, len: usize, distance: u32) {
        self.engine().with_queue(|queue| queue.prefetch_hint(op, offset, len, distance));
    }

    /// Reports which of `len` bytes from `offset` on may hold data, as contiguous extents: at least
    /// one unless the range is empty, at most `max_len`. The extents may cover only the beginning
    /// of the range.
    ///
    /// Bytes that were written before the request are reported as data, unless they were discarded
    /// or zeroed since. Concurrent changes may be reported or not. A separate thread queries the
    /// disk, because the query may block.
    ///
    /// # Errors
    /// [`BlockError::OutOfRange`].
    pub async fn extents(
        &self,
        offset: u64,
        len: u64,
        max_len: usize,
    ) -> Result<Vec<Extent>, BlockError> {
        self.range(offset, len)?;
        let DeviceShared { queries, disk, .. } = self.device();
        Ok(extents::extents(queries, disk, offset, len, max_len).await)
    }

    /// Allocates `count` buffers of `size` bytes for [`read_direct`](Self::read_direct) and
    /// [`write_direct`](Self::write_direct). The buffers belong to the caller: no other request
    /// waits for them.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, MapError> {
        BufferPool::new(count, size)
    }

    /// True if these bytes can be transferred without a copy: they are whole blocks, at least one,
    /// and fit into one request.
    #[must_use]
    pub fn is_direct(&self, offset: u64, len: usize) -> bool {
        (1..=self.large().buffer_size()).contains(&len) && self.is_whole(offset, len as u64)
    }

    pub(crate) fn is_whole(&self, offset: u64, len: u64) -> bool {
        let block = u64::from(self.geometry().block_size);
        offset.is_multiple_of(block) && len.is_multiple_of(block)
    }

    /// Reads `len` bytes from `offset` on to the beginning of `buffer`. Returns the buffer. The
    /// range must be [direct](Self::is_direct), and the buffer must have at least `len` bytes.
    ///
    /// # Errors
    /// [`BlockError`]; the buffer returns to its pool.
    pub async fn read_direct(
        &self,
        offset: u64,
        len: usize,
        buffer: Buffer,
    ) -> Result<Buffer, BlockError> {
        self.range(offset, len as u64)?;
        self.transfer_direct(Op::Read, (offset, len), buffer, None).await
    }

    /// Writes the first `len` bytes of `buffer` to `offset`. Returns the buffer. The requirements
    /// are those of [`read_direct`](Self::read_direct); `fua` is as for [`write`](Self::write).
    ///
    /// # Errors
    /// [`BlockError`]; the buffer returns to its pool.
    pub async fn write_direct(
        &self,
        offset: u64,
        len: usize,
        buffer: Buffer,
        fua: bool,
    ) -> Result<Buffer, BlockError> {
        let range = self.range_to_change(offset, len as u64)?;
        let guard = self.lock(&range).await;
        self.transfer_direct(Op::Write { fua }, (offset, len), buffer, guard).await
    }

    async fn transfer_direct(
        &self,
        op: Op,
        (offset, len): (u64, usize),
        buffer: Buffer,
        guard: Option<Arc<RangeGuard>>,
    ) -> Result<Buffer, BlockError> {
        if !self.is_direct(offset, len) || buffer.len() < len {
            return Err(BlockError::Buffer);
        }
        let request = Request { op, offset, len: len as u64 };
        match self.request(request, Data::Buffer(buffer), guard).await? {
            Data::Buffer(buffer) => Ok(buffer),
            Data::Segments(_) => Err(BlockError::Buffer),
        }
    }

    /// Checks a range against the disk's size, and splits it into blocks.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Result<BlockRange, BlockError> {
        let geometry = self.geometry();
        let size = geometry.bytes;
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(BlockRange::of(offset, end, geometry.block_size.into())),
            _ => Err(BlockError::OutOfRange { offset, len, size }),
        }
    }

    /// As [`range`](Self::range), for a request that changes the disk. Fails if the disk is
    /// read-only.
    pub(crate) fn range_to_change(&self, offset: u64, len: u64) -> Result<BlockRange, BlockError> {
        if self.geometry().read_only { Err(BlockError::ReadOnly) } else { self.range(offset, len) }
    }

    /// Locks a range for writing. The lock is exclusive if the range has partial blocks. Returns
    /// `None` for an empty range.
    pub(crate) async fn lock(&self, range: &BlockRange) -> Option<Arc<RangeGuard>> {
        if range.start == range.end {
            return None;
        }
        let exclusive = range.edges().next().is_some();
        Some(Arc::new(self.device().locks.acquire(range.start, range.end, exclusive).await))
    }

    /// Creates a request. It is submitted when it is first polled.
    pub(crate) fn request(
        &self,
        request: Request,
        data: Data,
        guard: Option<Arc<RangeGuard>>,
    ) -> InFlight<'_> {
        InFlight::new(self.engine(), request, data, guard)
    }

    /// Largest range of a request without data, in bytes.
    pub(crate) fn longest_without_data(&self) -> u64 {
        self.0.longest
    }
}

impl fmt::Debug for BlockQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockQueue")
            .field("geometry", self.geometry())
            .field("pending", &self.pending())
            .finish_non_exhaustive()
    }
}
