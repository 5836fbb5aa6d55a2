//! Options of a block device.

/// Resource limits and access mode of a [`BlockDevice`](crate::BlockDevice).
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BlockOptions {
    /// Size of a large buffer in bytes, and thereby of the longest command. Rounded to whole
    /// blocks, and limited by the controller's transfer limit.
    pub chunk_bytes: usize,
    /// Number of large buffers per queue.
    pub chunks: usize,
    /// Number of small buffers per queue, for requests of up to 4096 bytes (or one block, if that
    /// is longer); 0 for as many as the queue has slots.
    pub small_buffers: usize,
    /// Maximum number of commands in flight for one long request.
    pub window: usize,
    /// Refuses all changes of the disk.
    pub read_only: bool,
}

impl Default for BlockOptions {
    /// 32 buffers of 256 KiB per queue, at most eight of them for one request.
    fn default() -> Self {
        Self { chunk_bytes: 256 << 10, chunks: 32, small_buffers: 0, window: 8, read_only: false }
    }
}
