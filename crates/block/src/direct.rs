//! Whole blocks to and from buffers of the caller's own, without a copy.

use crate::buffers::Lease;
use crate::device::BlockDevice;
use crate::error::BlockError;
use crate::locks::RangeGuard;
use crate::shared::Handle;
use shadowbell_driver::{Buffer, BufferPool, Command, DmaError, Namespace, RequestError};
use std::sync::Arc;

impl BlockDevice {
    /// Memory for `count` buffers of `size` bytes that the controller can reach, for
    /// [`read_direct`](Self::read_direct) and [`write_direct`](Self::write_direct). They belong to
    /// the caller: no other request waits for them, however long they are kept.
    ///
    /// # Errors
    /// [`DmaError`].
    pub fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        let queue = self.handle().queue().map_err(|_| DmaError::Detached)?;
        queue.disk.queue().buffers(count, size)
    }

    /// Whether these bytes can be moved without a copy: they are whole blocks, one or more, and no
    /// more than go with one command.
    #[must_use]
    pub fn is_direct(&self, offset: u64, len: usize) -> bool {
        let block = u64::from(self.geometry().block_size);
        let most = self.handle().queue().map_or(0, |queue| queue.large.size());
        (1..=most).contains(&len)
            && offset.is_multiple_of(block)
            && (len as u64).is_multiple_of(block)
    }

    /// Reads `len` bytes from `offset` on to the beginning of `buffer`, and gives it back. The
    /// bytes have to be [direct](Self::is_direct), and the buffer as long as they are, or longer.
    ///
    /// # Errors
    /// [`BlockError`]. The buffer goes back to its pool then.
    pub async fn read_direct(
        &self,
        offset: u64,
        len: usize,
        buffer: Buffer,
    ) -> Result<Buffer, BlockError> {
        self.handle().range(offset, len as u64)?;
        self.transfer_direct((offset, len), buffer, None, Namespace::read).await
    }

    /// Writes the first `len` bytes of `buffer` from `offset` on, and gives it back. Otherwise as
    /// [`read_direct`](Self::read_direct) and [`write`](Self::write) have it.
    ///
    /// # Errors
    /// [`BlockError`]. The buffer goes back to its pool then.
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
