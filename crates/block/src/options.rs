//! Options of a block device.

use std::time::Duration;

/// Resource limits and access mode of a [`BlockDevice`](crate::BlockDevice).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BlockOptions {
    /// Size of a large buffer in bytes, rounded to whole blocks. It is also the limit of a single
    /// request.
    pub chunk_bytes: usize,
    /// Number of large buffers per queue.
    pub chunks: usize,
    /// Number of small buffers per queue; 0 for the default of 128. They are for requests of up to
    /// 4096 bytes, or of up to one block if that is longer.
    pub small_buffers: usize,
    /// Maximum number of requests in flight for one long operation.
    pub window: usize,
    /// True to refuse all changes of the disk.
    pub read_only: bool,
    /// Number of threads that should access the device at the same time.
    pub queues: usize,
    /// Longest time for which a thread polls for requests and completions before it sleeps.
    pub poll: Duration,
    /// Time after which a request is cancelled.
    pub timeout: Duration,
}

impl Default for BlockOptions {
    /// Default options: 32 buffers of 256 KiB per queue, at most eight of them for one operation;
    /// one queue, no polling, a timeout of 30 seconds.
    fn default() -> Self {
        Self {
            chunk_bytes: 256 << 10,
            chunks: 32,
            small_buffers: 0,
            window: 8,
            read_only: false,
            queues: 1,
            poll: Duration::ZERO,
            timeout: Duration::from_secs(30),
        }
    }
}
