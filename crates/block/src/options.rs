//! What a disk may use.

/// What a [`BlockDevice`](crate::BlockDevice) may use.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BlockOptions {
    /// Bytes of a large buffer, and so of the longest command: rounded to whole blocks, and not
    /// more than the controller takes.
    pub chunk_bytes: usize,
    /// Large buffers per queue.
    pub chunks: usize,
    /// Buffers per queue for requests of up to 4096 bytes (or one block, where that is more); 0 for
    /// as many as the queue takes commands.
    pub small_buffers: usize,
    /// How many commands of one long request are in flight at the same time.
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
