//! Memory that the device can reach, and the buffers that commands move data with.

use crate::transport::{Transport, TransportError};
use parking_lot::Mutex;
use shadowbell_memory::{HUGE_PAGE, MapError, Mapping, SharedBytes};
use std::fmt;
use std::sync::{Arc, Weak};
use thiserror::Error;

/// Why there is no memory to share with the device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DmaError {
    /// The system has none, or the length is impossible.
    #[error("no memory to share with the device: {0}")]
    Map(#[from] MapError),
    /// The device can not have it.
    #[error("memory could not be shared with the device: {0}")]
    Transport(#[from] TransportError),
    /// The transport gave the memory an address that NVMe can not use.
    #[error("{device} placed shared memory at IOVA {iova:#x}, which is no multiple of 4096")]
    Alignment {
        /// [`Transport::name`].
        device: String,
        /// The address.
        iova: u64,
    },
    /// The controller that would reach the memory is not attached any more.
    #[error("no memory is shared with a controller that was detached; attach again")]
    Detached,
}

/// A mapping that the device can reach at `iova`, as long as the value lives.
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
        // Huge pages where there are some, for what fills one: most machines set none aside.
        let huge = if len >= HUGE_PAGE { Mapping::shared_huge(name, len).ok() } else { None };
        let mapping = huge.map_or_else(|| Mapping::shared(name, len), Ok)?;
        Self::over(transport, mapping)
    }

    /// Shares memory that is there.
    fn over(transport: &Arc<dyn Transport>, mapping: Arc<Mapping>) -> Result<Arc<Self>, DmaError> {
        let iova = transport.map_dma(&mapping)?;
        let region = Self { mapping, iova, transport: Arc::clone(transport) };
        if !iova.is_multiple_of(4096) || iova.checked_add(region.len()).is_none() {
            // Dropping the region takes it away from the device again.
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
            // Keeps the mapping, and with it its pages and its address, until the process ends.
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

/// A buffer for the data of a command, at one address for the device (IOVA) without a gap.
///
/// A command that is submitted takes its buffer along and gives it back with its completion; in
/// between the program has no way to it, and nothing that the program drops can free it. The bytes
/// are shared memory: a device that misbehaves may change them at any time, so they are copied in
/// and out and never borrowed.
pub struct Buffer(Arc<Chunk>);

struct Chunk {
    bytes: SharedBytes,
    iova: u64,
    /// Keeps the memory shared with the device.
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

    /// Never: a buffer has at least one byte. Here because [`len`](Self::len) is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.bytes.is_empty()
    }

    /// The device's address of the first byte.
    #[inline]
    #[must_use]
    pub fn iova(&self) -> u64 {
        self.0.iova
    }

    /// The bytes.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> &SharedBytes {
        &self.0.bytes
    }

    /// Copies all of `from` into the buffer at `offset`; `false`, and nothing copied, if it does
    /// not fit.
    #[must_use = "nothing is copied if it does not fit"]
    pub fn copy_from(&mut self, offset: usize, from: &[u8]) -> bool {
        self.0.bytes.write_from(offset, from).is_some()
    }

    /// Copies from the buffer at `offset` into all of `into`; `false`, and nothing copied, if there
    /// is not enough.
    #[must_use = "nothing is copied if there is not enough"]
    pub fn copy_to(&self, offset: usize, into: &mut [u8]) -> bool {
        self.0.bytes.read_into(offset, into).is_some()
    }

    /// A copy of the first `len` bytes (of all, if there are not that many).
    #[must_use]
    pub fn to_vec(&self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len.min(self.len())];
        // The length was just cut to what is there.
        let _ = self.0.bytes.read_into(0, &mut out);
        out
    }

    /// Sets every byte to `byte`.
    pub fn fill(&mut self, byte: u8) {
        // All of the buffer is inside of itself.
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

/// Memory that the program has for other reasons, and that the device may reach for as long as this
/// or a buffer in it lives: for commands that move data from or to where they belong, without a
/// copy.
///
/// The device may write to all of it at any time, as a device that misbehaves may to every buffer.
#[derive(Debug)]
pub struct SharedMemory(Arc<Region>);

impl SharedMemory {
    pub(crate) fn new(
        transport: &Arc<dyn Transport>,
        mapping: &Arc<Mapping>,
    ) -> Result<Self, DmaError> {
        Region::over(transport, Arc::clone(mapping)).map(Self)
    }

    /// The memory.
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.0.mapping
    }

    /// `len` bytes (not 0) from `offset` on as the buffer of a command; nothing if they are not all
    /// there. `used`, a buffer of shared memory that nobody needs any more, saves an allocation.
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

/// Buffers of one size, in memory that was shared with the device once, when the pool was made.
///
/// A clone is another handle on the same pool. A buffer goes back to its pool when it is dropped;
/// taking one and dropping it costs a lock, so a program that is in a hurry submits the buffer that
/// a completion gave it again.
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
    /// `count` buffers of `size` bytes each, rounded up to at least one of each. Buffers of less
    /// than a page do not cross pages (`page`, the controller's memory page size), larger ones
    /// start at one: both keep PRPs few.
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
            // Divides the page, so that none crosses into the next; and no two share a cache line.
            size.max(64).checked_next_power_of_two()
        }
        .ok_or_else(impossible)?;
        // The transport aligns to 4096 bytes; the rest of a larger page is found inside.
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

    /// A buffer, or nothing if all are in use. Its bytes are what the last user left there.
    #[must_use]
    pub fn take(&self) -> Option<Buffer> {
        self.0.free.lock().pop().map(Buffer)
    }

    /// How many buffers the pool has, free or not.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.count
    }

    /// How many are free now.
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
