//! What every handle of a queue, and every future on it, keeps.

use super::parking::WorkerParking;
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

/// Buffers for the ranges of Dataset Management and Copy commands.
const RANGE_BUFFERS: usize = 8;
/// Bytes of each: 256 ranges of the longer kind.
const RANGE_BYTES: usize = 256 * size_of::<CopyRange>();

/// A queue with its thread. With the last reference the queue is closed.
pub(super) struct AsyncHandle {
    pub(super) parking: Arc<WorkerParking>,
    thread: Option<JoinHandle<()>>,
    ranges: OnceLock<BufferPool>,
}

impl AsyncHandle {
    /// Gives `queue` a thread.
    pub(super) fn start(queue: QueuePair) -> io::Result<Self> {
        let sleeping = Arc::new(AtomicU32::new(0));
        let parking = Arc::new(WorkerParking::new(AsyncShared::new(&queue, &sleeping)?));
        parking.park(Box::new(Worker::new(queue, sleeping)));
        let thread = Some(thread::spawn(Arc::clone(&parking))?);
        Ok(Self { parking, thread, ranges: OnceLock::new() })
    }

    pub(super) fn shared(&self) -> &AsyncShared {
        &self.parking.shared
    }

    /// A buffer for `len` bytes of ranges.
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
        // A pool that was just made has its one buffer.
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
        // The last handle may go down with a waker, on the thread itself.
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}
