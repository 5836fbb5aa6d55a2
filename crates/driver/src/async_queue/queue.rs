//! Public handle of an async queue.

use super::future::Io;
use super::shared::AsyncShared;
use super::worker::AsyncHandle;
use crate::command::Command;
use crate::dma::{Buffer, BufferPool, DmaError};
use crate::metadata::MetadataCommand;
use crate::queue::QueueStats;
use crate::queue_pair::QueuePair;
use std::fmt;
use std::io;
use std::sync::Arc;

/// A queue pair with a queue thread, for futures of any executor. A clone is another handle to the
/// same queue.
///
/// After the last handle and the last future were dropped, the queue thread waits until the
/// outstanding commands complete or time out, deletes the queue pair and ends. The last drop waits
/// for the end of the thread.
#[derive(Clone)]
pub struct AsyncQueue(Arc<AsyncHandle>);

impl AsyncQueue {
    /// Starts a queue thread for `queue`.
    ///
    /// # Errors
    /// The error of the system, if no thread or descriptor is available.
    pub fn start(queue: QueuePair) -> io::Result<Self> {
        Ok(Self(Arc::new(AsyncHandle::start(queue)?)))
    }

    /// Creates the future of an I/O command, with a buffer if the command transfers data. The
    /// command is submitted when the future is first polled.
    pub fn submit(&self, command: Command, buffer: Option<Buffer>) -> Io {
        Io::new(Arc::clone(&self.0), command, buffer)
    }

    /// Creates the future of a command with metadata, like [`submit`](Self::submit).
    pub fn submit_with_metadata(&self, command: MetadataCommand, buffer: Option<Buffer>) -> Io {
        Io::with_metadata(Arc::clone(&self.0), command, buffer)
    }

    /// Allocates `count` buffers of `size` bytes in memory that is shared with the controller. Same
    /// as [`Controller::buffers`](crate::Controller::buffers), for code that has no `Controller`.
    ///
    /// # Errors
    /// [`DmaError`].
    pub fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        self.shared().pool(count, size)
    }

    /// Statistics of the queue. The queue thread updates them when it prepares to sleep.
    #[must_use]
    pub fn stats(&self) -> QueueStats {
        self.shared().lock().stats
    }

    /// The identifier of the submission and completion queue.
    #[must_use]
    pub fn qid(&self) -> u16 {
        self.shared().qid
    }

    /// The maximum number of outstanding commands; further commands wait.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.shared().capacity
    }

    pub(super) fn handle(&self) -> &Arc<AsyncHandle> {
        &self.0
    }

    fn shared(&self) -> &AsyncShared {
        self.0.shared()
    }
}

impl fmt::Debug for AsyncQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncQueue").field("capacity", &self.capacity()).finish_non_exhaustive()
    }
}
