//! Zero-copy I/O of whole blocks with buffers of the caller.

use crate::buffers::Lease;
use crate::device::BlockDevice;
use crate::error::BlockError;
use crate::locks::RangeGuard;
use crate::shared::Handle;
use shadowbell_driver::{Buffer, BufferPool, Command, DmaError, Namespace, RequestError};
use std::sync::Arc;

impl BlockDevice {
    /// Allocates `count` buffers of `size` bytes in memory that is shared with the controller, for
    /// [`read_direct`](Self::read_direct) and [`write_direct`](Self::write_direct). The buffers
    /// belong to the caller: no other request waits for them.
    ///
    /// # Errors
    /// [`DmaError`].
    pub fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        let queue = self.handle().queue().map_err(|_| DmaError::Detached)?;
        queue.disk.queue().buffers(count, size)
    }

    /// True if these bytes can be transferred without a copy: whole blocks, at least one, and no
    /// more than one command transfers.
    #[must_use]
    pub fn is_direct(&self, offset: u64, len: usize) -> bool {
        let block = u64::from(self.geometry().block_size);
        let most = self.handle().queue().map_or(0, |queue| queue.large.size());
        (1..=most).contains(&len)
            && offset.is_multiple_of(block)
            && (len as u64).is_multiple_of(block)
    }

    /// Reads `len` bytes from `offset` on to the beginning of `buffer`. Returns the buffer. The
    /// range must be [direct](Self::is_direct), and the buffer have at least `len` bytes.
    ///
    /// # Errors
    /// [`BlockError`]; the buffer returns to its pool.
    pub async fn read_direct(
        &self,
        offset: u64,
        len: usize,
        buffer: Buffer,
    ) -> Result<Buffer, BlockError> {
        self.handle().range(offset, len as u64)?;
        self.transfer_direct((offset, len), buffer, None, Namespace::read).await
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
        let range = self.handle().range_to_change(offset, len as u64)?;
        let guard = self.handle().lock(&range).await;
        let write = |namespace: &Namespace, lba, blocks| {
            let command = namespace.write(lba, blocks)?;
            Ok(if fua { command.with_fua() } else { command })
        };
        self.transfer_direct((offset, len), buffer, guard, write).await
    }

    async fn transfer_direct(
        &self,
        (offset, len): (u64, usize),
        buffer: Buffer,
        guard: Option<Arc<RangeGuard>>,
        command: impl FnOnce(&Namespace, u64, u32) -> Result<Command, RequestError>,
    ) -> Result<Buffer, BlockError> {
        if !self.is_direct(offset, len) || buffer.len() < len {
            return Err(BlockError::Buffer);
        }
        let handle: &Handle = self.handle();
        let namespace = handle.namespace()?;
        let blocks = namespace.blocks_in(len as u64)?;
        let blocks = u32::try_from(blocks).map_err(|_| RequestError::Blocks { blocks })?;
        let command = command(namespace, namespace.blocks_in(offset)?, blocks)?;
        let lease = handle.command(command, Some(Lease::of(buffer)), guard)?.await?;
        lease.and_then(|mut lease| lease.buffer.take()).ok_or(BlockError::Buffer)
    }
}
