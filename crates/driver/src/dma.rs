//! DMA memory: shared regions, buffers and buffer pools.

use crate::transport::{Transport, TransportError};
use parking_lot::Mutex;
use shadowbell_memory::{HUGE_PAGE, MapError, Mapping, SharedBytes};
use std::fmt;
use std::sync::{Arc, Weak};
use thiserror::Error;

/// Failure to share memory with the device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DmaError {
    /// The system has no free memory, or the length is invalid.
    #[error("no memory to share with the device: {0}")]
    Map(#[from] MapError),
    /// The transport cannot share the memory.
    #[error("memory could not be shared with the device: {0}")]
    Transport(#[from] TransportError),
    /// The transport mapped the memory at an IOVA that NVMe cannot use.
    #[error("{device} placed shared memory at IOVA {iova:#x}, which is no multiple of 4096")]
    Alignment {
        /// Name of the device ([`Transport::name`]).
        device: String,
        /// I/O virtual address.
        iova: u64,
    },
    /// The controller was detached, so no memory can be shared with it.
    #[error("no memory is shared with a controller that was detached; attach again")]
    Detached,
}

/// A mapping that is shared with the device at `iova` until the value is dropped.
pub(crate) struct Region {
    mapping: Arc<Mapping>,
    iova: u64,
    transport: Arc<dyn Transport>,
}

impl Region {
    pub(crate) fn new(
        transport: &Arc<dyn Transport>,
        name: &str,
        len: u64,
    ) -> Result<Arc<Self>, DmaError> {
        // A region of the size of a huge page or more is mapped with huge pages. If the machine has
        // reserved none, normal pages are used.
        let huge = if len >= HUGE_PAGE { Mapping::shared_huge(name, len).ok() } else { None };
        let mapping = huge.map_or_else(|| Mapping::shared(name, len), Ok)?;
        Self::over(transport, mapping)
    }

    /// Shares an existing mapping.
    fn over(transport: &Arc<dyn Transport>, mapping: Arc<Mapping>) -> Result<Arc<Self>, DmaError> {
        let iova = transport.map_dma(&mapping)?;
        let region = Self { mapping, iova, transport: Arc::clone(transport) };
        if !iova.is_multiple_of(4096) || iova.checked_add(region.len()).is_none() {
            // The drop of `region` unmaps the memory from the device again.
            return Err(DmaError::Alignment { device: transport.name().to_owned(), iova });
        }
        Ok(Arc::new(region))
    }

    pub(crate) fn iova(&self) -> u64 {
        self.iova
    }

    pub(crate) fn len(&self) -> u64 {
        self.mapping.len() as u64
    }

    pub(crate) fn bytes(&self) -> SharedBytes {
        self.mapping.bytes()
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Err(error) = self.transport.unmap_dma(self.iova, self.len()) {
            tracing::warn!(
                iova = self.iova,
                len = self.len(),
                "{} may still write to memory that was shared with it, so the memory is kept: {error}",
                self.transport.name()
            );
            // Leaks the mapping: its pages and its address stay reserved until the process ends.
            std::mem::forget(Arc::clone(&self.mapping));
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region")
            .field("iova", &format_args!("{:#x}", self.iova))
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}

/// A buffer for the data of a command, contiguous in the device's address space (IOVA).
///
/// A submitted command owns its buffer and returns it with the completion. In between, the program
/// cannot access or free the buffer. The bytes are shared memory that a misbehaving device may
/// change at any time. So they are copied in and out and never borrowed.
pub struct Buffer(Arc<Chunk>);

struct Chunk {
    bytes: SharedBytes,
    iova: u64,
    /// Keeps the memory shared with the device while the buffer exists.
    _region: Arc<Region>,
    pool: Weak<Pool>,
}

impl Buffer {
    /// The length in bytes.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.bytes.len()
    }

    /// Always false: a buffer has at least one byte. Exists as the counterpart of
    /// [`len`](Self::len).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.bytes.is_empty()
    }

    /// The device's address (IOVA) of the first byte.
    #[inline]
    #[must_use]
    pub fn iova(&self) -> u64 {
        self.0.iova
    }

    /// The bytes of the buffer, as shared memory.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> &SharedBytes {
        &self.0.bytes
    }

    /// Copies all of `from` into the buffer at `offset`. If `from` does not fit, copies nothing and
    /// returns `false`.
    #[must_use = "nothing is copied if it does not fit"]
    pub fn copy_from(&mut self, offset: usize, from: &[u8]) -> bool {
        self.0.bytes.write_from(offset, from).is_some()
    }

    /// Fills `into` with the bytes of the buffer from `offset` on. If the buffer is too short,
    /// copies nothing and returns `false`.
    #[must_use = "nothing is copied if there is not enough"]
    pub fn copy_to(&self, offset: usize, into: &mut [u8]) -> bool {
        self.0.bytes.read_into(offset, into).is_some()
    }

    /// Copies the first `len` bytes, or all bytes if the buffer is shorter.
    #[must_use]
    pub fn to_vec(&self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len.min(self.len())];
        // `read_into` cannot fail: `out` is no longer than the buffer.
        let _ = self.0.bytes.read_into(0, &mut out);
        out
    }

    /// Sets every byte to `byte`.
    pub fn fill(&mut self, byte: u8) {
        // `fill` cannot fail: the range is the whole buffer.
        let _ = self.0.bytes.fill(0, self.len(), byte);
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(pool) = self.0.pool.upgrade() {
            pool.put(Arc::clone(&self.0));
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("iova", &format_args!("{:#x}", self.iova()))
            .field("len", &self.len())
            .finish()
    }
}

/// Existing memory of the program that is shared with the device until this value and all its
/// buffers are dropped, for I/O without a copy.
///
/// A misbehaving device may write to all of the memory at any time, as to every buffer.
#[derive(Debug)]
pub struct SharedMemory(Arc<Region>);

impl SharedMemory {
    pub(crate) fn new(
        transport: &Arc<dyn Transport>,
        mapping: &Arc<Mapping>,
    ) -> Result<Self, DmaError> {
        Region::over(transport, Arc::clone(mapping)).map(Self)
    }

    /// The shared mapping.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.0.mapping
    }

    /// Creates a buffer of `len` bytes at `offset`. Returns `None` if `len` is 0 or the range
    /// exceeds the mapping. `used` saves an allocation: it is a buffer from an earlier call that
    /// the caller no longer needs.
    #[must_use]
    pub fn buffer(&self, offset: usize, len: usize, used: Option<Buffer>) -> Option<Buffer> {
        let bytes = self.0.bytes().slice(offset, len).filter(|_| len != 0)?;
        let iova = self.0.iova().checked_add(offset as u64)?;
        let chunk = Chunk { bytes, iova, _region: Arc::clone(&self.0), pool: Weak::new() };
        if let Some(mut used) = used
            && used.0.pool.strong_count() == 0
            && let Some(place) = Arc::get_mut(&mut used.0)
        {
            *place = chunk;
            return Some(used);
        }
        Some(Buffer(Arc::new(chunk)))
    }
}

/// Buffers of one size, in memory that is shared with the device once, when the pool is created.
///
/// A clone is another handle to the same pool. A dropped buffer returns to its pool. The pool
/// acquires a lock when a buffer is taken and when it is dropped. To avoid both, submit the buffer
/// of a completion again.
#[derive(Clone, Debug)]
pub struct BufferPool(Arc<Pool>);

struct Pool {
    free: Mutex<Vec<Arc<Chunk>>>,
    count: usize,
    size: usize,
}

impl Pool {
    fn put(&self, chunk: Arc<Chunk>) {
        self.free.lock().push(chunk);
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("count", &self.count)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl BufferPool {
    /// Creates `count` buffers of `size` bytes each. A `count` or `size` of 0 counts as 1. Buffers
    /// smaller than `page` (the controller's memory page size) do not cross pages, and larger
    /// buffers begin at a page boundary, so that transfers need few PRPs.
    pub(crate) fn new(
        transport: &Arc<dyn Transport>,
        count: usize,
        size: usize,
        page: usize,
    ) -> Result<Self, DmaError> {
        let (count, size) = (count.max(1), size.max(1));
        let impossible = || {
            DmaError::Map(MapError::Shape {
                len: (size as u64).saturating_mul(count as u64),
                offset: 0,
                why: "the buffers do not fit the address space",
            })
        };
        let stride = if size >= page {
            size.checked_next_multiple_of(page)
        } else {
            // A stride that is a power of two divides the page size, so no buffer crosses pages.
            // The minimum of 64 keeps buffers in separate cache lines.
            size.max(64).checked_next_power_of_two()
        }
        .ok_or_else(impossible)?;
        // The transport aligns to 4096 bytes only. The additional space allows an alignment to a
        // larger page.
        let slack = page.saturating_sub(4096);
        let len =
            stride.checked_mul(count).and_then(|l| l.checked_add(slack)).ok_or_else(impossible)?;
        let region = Region::new(transport, "shadowbell-buffers", len as u64)?;
        let bytes = region.bytes();
        let first = region.iova().next_multiple_of(page as u64) - region.iova();
        let pool = Arc::new_cyclic(|pool: &Weak<Pool>| {
            let chunks = (0..count).rev().filter_map(|i| {
                let offset = first as usize + i * stride;
                Some(Arc::new(Chunk {
                    bytes: bytes.slice(offset, size)?,
                    iova: region.iova() + offset as u64,
                    _region: Arc::clone(&region),
                    pool: Weak::clone(pool),
                }))
            });
            let free: Vec<_> = chunks.collect();
            Pool { count: free.len(), size, free: Mutex::new(free) }
        });
        Ok(Self(pool))
    }

    /// Takes a free buffer; `None` if all are in use. The buffer contains the bytes of its last
    /// use.
    #[must_use]
    pub fn take(&self) -> Option<Buffer> {
        self.0.free.lock().pop().map(Buffer)
    }

    /// The number of buffers of the pool, free or not.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.count
    }

    /// The number of free buffers.
    #[must_use]
    pub fn available(&self) -> usize {
        self.0.free.lock().len()
    }

    /// The size of each buffer in bytes.
    #[must_use]
    pub fn buffer_size(&self) -> usize {
        self.0.size
    }
}
