//! Namespace commands as futures.

use super::future::{Io, Transfer, Unit};
use super::queue::AsyncQueue;
use crate::command::Command;
use crate::dma::Buffer;
use crate::error::{IoError, IoErrorKind, RequestError};
use crate::metadata::MetadataCommand;
use crate::namespace::Namespace;
use shadowbell_spec::nvm::{CopyRange, DsmRange};
use std::sync::Arc;
use zerocopy::IntoBytes;

/// A namespace that is accessed through an [`AsyncQueue`].
///
/// Futures may be dropped at any time: see the [module](super) for the effect on their commands.
#[derive(Clone, Debug)]
pub struct AsyncNamespace {
    queue: AsyncQueue,
    namespace: Arc<Namespace>,
}

impl AsyncQueue {
    /// Opens `namespace` for commands through this queue.
    #[must_use]
    pub fn open(&self, namespace: &Namespace) -> AsyncNamespace {
        AsyncNamespace { queue: self.clone(), namespace: Arc::new(namespace.clone()) }
    }
}

impl AsyncNamespace {
    /// The namespace's properties.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The queue that executes the commands.
    #[must_use]
    pub fn queue(&self) -> &AsyncQueue {
        &self.queue
    }

    /// Reads blocks from `lba` on into all of `buffer`. Returns the buffer.
    pub fn read(&self, lba: u64, buffer: Buffer) -> Transfer {
        let blocks = self.blocks(&buffer);
        self.transfer(blocks.and_then(|blocks| self.namespace.read(lba, blocks)), buffer)
    }

    /// Writes all of `buffer` to the blocks from `lba` on. Returns the buffer.
    pub fn write(&self, lba: u64, buffer: Buffer) -> Transfer {
        let blocks = self.blocks(&buffer);
        self.transfer(blocks.and_then(|blocks| self.namespace.write(lba, blocks)), buffer)
    }

    /// Executes a command that was created by [`Namespace::read_with_metadata`] or a similar
    /// method. Returns the buffer with data and metadata.
    pub fn transfer_with_metadata(&self, command: MetadataCommand, buffer: Buffer) -> Transfer {
        Transfer(self.queue.submit_with_metadata(command, Some(buffer)))
    }

    /// Compares all of `buffer` with the blocks from `lba` on. Fails with Compare Failure if they
    /// differ. Returns the buffer.
    pub fn compare(&self, lba: u64, buffer: Buffer) -> Transfer {
        let blocks = self.blocks(&buffer);
        self.transfer(blocks.and_then(|blocks| self.namespace.compare(lba, blocks)), buffer)
    }

    /// Flush: makes all completed writes durable.
    pub fn flush(&self) -> Unit {
        Unit(self.queue.submit(self.namespace.flush(), None))
    }

    /// Verify: the controller checks that `blocks` blocks from `lba` are readable.
    pub fn verify(&self, lba: u64, blocks: u32) -> Unit {
        self.unit(self.namespace.verify(lba, blocks))
    }

    /// Zeroes `blocks` blocks from `lba`. With `deallocate`, the controller may deallocate them.
    pub fn write_zeroes(&self, lba: u64, blocks: u32, deallocate: bool) -> Unit {
        self.unit(self.namespace.write_zeroes(lba, blocks, deallocate))
    }

    /// Dataset Management, Deallocate: discards the data of 1 to 256 ranges. The controller chooses
    /// what deallocated blocks read as.
    pub fn discard(&self, ranges: &[DsmRange]) -> Unit {
        self.with_ranges(self.namespace.deallocate(ranges.len()), ranges.as_bytes())
    }

    /// Copies the blocks of `sources`, one range after the other, to consecutive blocks from `to`
    /// on, inside the controller: see [`Namespace::copy`].
    pub fn copy(&self, to: u64, sources: &[CopyRange]) -> Unit {
        self.with_ranges(self.namespace.copy(to, sources), sources.as_bytes())
    }

    fn with_ranges(&self, command: Result<Command, RequestError>, ranges: &[u8]) -> Unit {
        let command = match command {
            Ok(command) => command,
            Err(error) => return self.unit(Err(error)),
        };
        match self.queue.handle().range_buffer(ranges.len()) {
            Ok(mut buffer) => {
                // `copy_from` cannot fail: `range_buffer` returns at least `ranges.len()` bytes.
                let _ = buffer.copy_from(0, ranges);
                Unit(self.queue.submit(command, Some(buffer)))
            }
            Err(error) => {
                let kind = IoErrorKind::Dma(Arc::new(error));
                Unit(Io::refused(Arc::clone(self.queue.handle()), IoError { kind, buffer: None }))
            }
        }
    }

    fn blocks(&self, buffer: &Buffer) -> Result<u32, RequestError> {
        let bytes = buffer.len() as u64;
        let blocks = self.namespace.blocks_in(bytes)?;
        let max = self.namespace.max_transfer_bytes();
        u32::try_from(blocks).map_err(|_| RequestError::TooLong { bytes, max })
    }

    fn transfer(&self, command: Result<Command, RequestError>, buffer: Buffer) -> Transfer {
        Transfer(match command {
            Ok(command) => self.queue.submit(command, Some(buffer)),
            Err(error) => {
                let kind = IoErrorKind::Request(error);
                Io::refused(Arc::clone(self.queue.handle()), IoError { kind, buffer: Some(buffer) })
            }
        })
    }

    fn unit(&self, command: Result<Command, RequestError>) -> Unit {
        Unit(match command {
            Ok(command) => self.queue.submit(command, None),
            Err(error) => {
                let kind = IoErrorKind::Request(error);
                Io::refused(Arc::clone(self.queue.handle()), IoError { kind, buffer: None })
            }
        })
    }
}
