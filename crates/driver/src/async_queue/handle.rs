//! Shared handle of an async queue: its queue thread, and range buffers.

use super::shared::AsyncShared;
use super::thread;
use super::worker::Worker;
use crate::dma::{Buffer, BufferPool, DmaError};
use crate::queue_pair::QueuePair;
use shadowbell_memory::MapError;
use shadowbell_spec::nvm::CopyRange;
use std::io;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;

/// Number of pooled buffers for the ranges of Dataset Management and Copy commands.
const RANGE_BUFFERS: usize = 8;
/// Size of each range buffer in bytes: 256 source ranges of Copy, which are longer than the ranges
/// of Dataset Management.
const RANGE_BYTES: usize = 256 * size_of::<CopyRange>();

/// An async queue with its queue thread. Dropping the last reference closes the queue.
pub(super) struct AsyncHandle {
    shared: Arc<AsyncShared>,
    thread: Option<JoinHandle<()>>,
    ranges: OnceLock<BufferPool>,
}

impl AsyncHandle {
    /// Starts the queue thread of `queue`.
    pub(super) fn start(queue: QueuePair) -> io::Result<Self> {
        let sleeping = Arc::new(AtomicU32::new(0));
        let shared = Arc::new(AsyncShared::new(&queue, &sleeping)?);
        let thread = thread::spawn(Worker::new(queue, sleeping), Arc::clone(&shared))?;
        Ok(Self { shared, thread: Some(thread), ranges: OnceLock::new() })
    }

    pub(super) fn shared(&self) -> &AsyncShared {
        &self.shared
    }

    /// Takes a buffer for `len` bytes of ranges.
    pub(super) fn range_buffer(&self, len: usize) -> Result<Buffer, DmaError> {
        let make = |count| self.shared().pool(count, len.max(RANGE_BYTES));
        let pool = match self.ranges.get() {
            Some(pool) => pool,
            None => {
                let pool = make(RANGE_BUFFERS)?;
                self.ranges.get_or_init(|| pool)
            }
        };
        if let Some(buffer) = pool.take() {
            return Ok(buffer);
        }
        // Cannot fail: a new pool has a free buffer.
        make(1)?.take().ok_or(DmaError::Map(MapError::Shape {
            len: len as u64,
            offset: 0,
            why: "the pool has no buffer",
        }))
    }
}

impl Drop for AsyncHandle {
    fn drop(&mut self) {
        self.shared().close();
        // A thread cannot join itself. A waker that runs on the queue thread may have dropped the
        // last handle, so this may be the queue thread.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}
