//! Queue on the raw bytes of a formatted image file (qcow2), for guest data that the file stores
//! unchanged.

use super::flusher::Flusher;
use super::flusher::Requester;
use super::image::ImageFile;
use super::open::{engine, waits, zeroes};
use super::options::Aio;
use super::queue::FileQueue;
use super::ranges::Ranges;
use super::shared::{Alignment, FileShared, OpenHandle, ranges};
use super::write_atomicity::WriteAtomicity;
use crate::sys::{self, EngineKind, Key, Waker};
use shadowbell_disk::{DiskInfo, Op, OpenError, Queue, Request, Submitted};
use shadowbell_memory::Segments;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// Raw bytes of an [`ImageFile`], without its format. The caller implements the format and decides
/// which bytes a request may access. The queues do not support Flush; the caller syncs the file to
/// make writes durable.
#[derive(Debug)]
pub struct ImageBytes {
    shared: Arc<FileShared>,
}

impl ImageBytes {
    /// Prepares access to the bytes of `image`, for requests in blocks of `block_size` bytes.
    /// `direct` is the alignment of direct I/O, if the page cache is bypassed. Returns `None` if
    /// io_uring is unavailable or excluded by `aio`.
    ///
    /// # Errors
    /// [`OpenError::Memory`].
    pub fn new(
        image: &ImageFile,
        direct: Option<Alignment>,
        block_size: u32,
        aio: Aio,
    ) -> Result<Option<Self>, OpenError> {
        let Ok((EngineKind::Uring, no_uring)) = engine(aio, sys::available) else {
            return Ok(None);
        };
        let file = image.shared();
        let flusher = Flusher::new(Arc::clone(&file), direct.is_none());
        let info = DiskInfo {
            block_size,
            // The file may grow, so its size is no limit for requests.
            blocks: i64::MAX as u64 / u64::from(block_size),
            read_only: image.read_only,
            volatile_cache: false,
            discard: false,
            granularity: 1,
            metadata: None,
            zoned: None,
        };
        let atom = WriteAtomicity::of_file(
            &file,
            &image.metadata,
            image.is_block,
            direct.is_some(),
            block_size,
        );
        let shared = FileShared {
            // `true`: this handle must not release the lock of the file, which belongs to `image`.
            handle: OpenHandle::new(&file, None, &flusher, true),
            flusher,
            waits: waits(&file),
            file,
            info,
            atom,
            ranges: ranges(direct, block_size),
            direct,
            engine: EngineKind::Uring,
            no_uring,
            regular: !image.is_block,
            end: AtomicU64::new(u64::MAX),
            full: AtomicU64::new(0),
            no_zero_range: AtomicBool::new(false),
            no_punch: AtomicBool::new(false),
            // This file is no NVMe generic character device, because these hold only raw disks.
            namespace: None,
            zeroes: zeroes()?,
            #[cfg(feature = "scripted")]
            script: None,
        };
        Ok(Some(Self { shared: Arc::new(shared) }))
    }

    /// Opens a queue for the calling thread. Its wake descriptor is also readable while `also` is
    /// readable.
    ///
    /// # Errors
    /// The system's error if it lacks a resource that the queue needs.
    pub fn queue(&self, also: BorrowedFd<'_>) -> io::Result<BytesQueue> {
        let mut queue = FileQueue::new(Arc::clone(&self.shared))?;
        queue.merge(also)?;
        Ok(BytesQueue(queue))
    }

    /// Locks of the ranges that the queues' requests access. `None` if the file reads and writes
    /// blocks atomically without locks.
    #[must_use]
    pub fn range_locks(&self) -> Option<BytesLocks> {
        self.shared.ranges.clone().map(BytesLocks)
    }
}

/// Locks of the ranges that requests of [`BytesQueue`]s access. A thread that accesses the bytes by
/// system calls takes them, so that its reads and writes of blocks are atomic, too.
#[derive(Clone, Debug)]
pub struct BytesLocks(Arc<Ranges>);

impl BytesLocks {
    /// Waits until no other request conflicts with a read or a write (`writes`) of `len` bytes from
    /// byte `offset` on. Other requests wait until the result is dropped.
    #[must_use]
    pub fn lock(&self, offset: u64, len: u64, writes: bool) -> BytesLock {
        let op = if writes { Op::Write { fua: false } } else { Op::Read };
        let request = Request { op, offset, len };
        let requester = Requester::new(Waker::none());
        if !self.0.enter(&request, KEY, &requester) {
            requester.wait();
        }
        BytesLock { ranges: Arc::clone(&self.0), request, requester }
    }
}

/// Key of the only request of a [`BytesLock`].
const KEY: Key = Key::of(0, 0);

/// Locked range of [`BytesLocks`].
pub struct BytesLock {
    ranges: Arc<Ranges>,
    request: Request,
    requester: Arc<Requester>,
}

impl Drop for BytesLock {
    fn drop(&mut self) {
        self.ranges.leave(&self.request, KEY, &self.requester);
    }
}

impl std::fmt::Debug for BytesLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("BytesLock").field(&self.request).finish()
    }
}

/// One thread's queue on the bytes of an image.
pub struct BytesQueue(FileQueue);

impl Queue for BytesQueue {
    fn inner(&self) -> Option<&dyn Queue> {
        Some(&self.0)
    }

    fn inner_mut(&mut self) -> Option<&mut dyn Queue> {
        Some(&mut self.0)
    }

    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        self.0.submit(tag, request, data)
    }
}

impl std::fmt::Debug for BytesQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("BytesQueue")
    }
}
