//! Requests of a queue: reads, writes and the operations without data.

use crate::copy;
use crate::error::BlockError;
use crate::operations::{self, Zeroes};
use crate::queue::BlockQueue;
use shadowbell_memory::Segments;

impl BlockQueue {
    /// Reads the bytes from `offset` on into all of `into`.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BlockError> {
        operations::read(self, offset, into).await
    }

    /// Writes all of `from` to the bytes from `offset` on. With `fua`, the bytes are durable when
    /// the write completes.
    ///
    /// # Errors
    /// [`BlockError`]; some of the bytes may have been written.
    pub async fn write(&self, offset: u64, from: &[u8], fua: bool) -> Result<(), BlockError> {
        operations::write(self, offset, from, fua).await
    }

    /// Zeroes `len` bytes from `offset` on.
    ///
    /// # Errors
    /// [`BlockError`]; some of the bytes may have been zeroed.
    pub async fn write_zeroes(&self, offset: u64, len: u64, how: Zeroes) -> Result<(), BlockError> {
        operations::write_zeroes(self, offset, len, how).await
    }

    /// Discards the whole blocks within `len` bytes from `offset` on. Partial blocks at the ends
    /// remain unchanged.
    ///
    /// # Errors
    ///
    /// [`BlockError::Unsupported`] if the disk cannot discard; other errors.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<(), BlockError> {
        operations::discard(self, offset, len).await
    }

    /// True if the bytes from `offset` on are equal to `with`.
    ///
    /// # Errors
    /// [`BlockError`].
    pub async fn compare(&self, offset: u64, with: &[u8]) -> Result<bool, BlockError> {
        operations::compare(self, offset, with).await
    }

    /// Makes all writes durable that have completed on any queue.
    ///
    /// # Errors
    ///
    /// [`BlockError`].
    pub async fn flush(&self) -> Result<(), BlockError> {
        operations::flush(self).await
    }

    /// Copies `len` bytes from `from` to `to` by reading and writing. The ranges may overlap:
    /// afterwards the destination has the content that the source had before.
    ///
    /// A concurrent write to a block of the source takes effect either before or after the copy of
    /// that block, as with a read. Requests that overlap the destination are ordered as with a
    /// write.
    ///
    /// # Errors
    /// [`BlockError`]. Some of the bytes may have been copied; if source and destination overlap, a
    /// part of the source may be overwritten.
    pub async fn copy(&self, from: u64, to: u64, len: u64) -> Result<(), BlockError> {
        copy::copy(self, from, to, len).await
    }

    /// Reads from `offset` on into all of `data`, which describes memory of the caller. Returns the
    /// segments.
    ///
    /// # Errors
    ///
    /// [`BlockError`]; some of the bytes may have been read.
    pub async fn read_to(&self, offset: u64, data: Segments) -> Result<Segments, BlockError> {
        operations::read_to(self, offset, data).await
    }

    /// Writes all of `data`, which describes memory of the caller, to the bytes from `offset` on.
    /// Returns the segments. `fua` is as for [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// [`BlockError`]; some of the bytes may have been written.
    pub async fn write_from(
        &self,
        offset: u64,
        data: Segments,
        fua: bool,
    ) -> Result<Segments, BlockError> {
        operations::write_from(self, offset, data, fua).await
    }
}
