//! The commands on a namespace, as futures.

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

/// A namespace, through an [`AsyncQueue`].
///
/// Every future here may be dropped at any time: see the [module](super) for what happens then.
#[derive(Clone, Debug)]
pub struct AsyncNamespace {
    queue: AsyncQueue,
    namespace: Arc<Namespace>,
}

impl AsyncQueue {
    /// The way to use `namespace` through this queue.
    #[must_use]
    pub fn open(&self, namespace: &Namespace) -> AsyncNamespace {
        AsyncNamespace { queue: self.clone(), namespace: Arc::new(namespace.clone()) }
    }
}

impl AsyncNamespace {
    /// What the namespace is.
    #[must_use]
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The queue that the commands go through.
    #[must_use]
    pub fn queue(&self) -> &AsyncQueue {
        &self.queue
    }

    /// Reads into all of `buffer`, from block `lba` on. Gives the buffer back.
    pub fn read(&self, lba: u64, buffer: Buffer) -> Transfer {
        let blocks = self.blocks(&buffer);
        self.transfer(blocks.and_then(|blocks| self.namespace.read(lba, blocks)), buffer)
    }

    /// Writes all of `buffer`, from block `lba` on. Gives the buffer back.
    pub fn write(&self, lba: u64, buffer: Buffer) -> Transfer {
        let blocks = self.blocks(&buffer);
        self.transfer(blocks.and_then(|blocks| self.namespace.write(lba, blocks)), buffer)
    }

    /// A command of [`Namespace::read_with_metadata`] and the like. Gives the buffer back, which
    /// has the data and the metadata.
    pub fn transfer_with_metadata(&self, command: MetadataCommand, buffer: Buffer) -> Transfer {
        Transfer(self.queue.submit_with_metadata(command, Some(buffer)))
    }

    /// Compares all of `buffer` with what is there from block `lba` on: Compare Failure if they
    /// differ. Gives the buffer back.
    pub fn compare(&self, lba: u64, buffer: Buffer) -> Transfer {
        let blocks = self.blocks(&buffer);
        self.transfer(blocks.and_then(|blocks| self.namespace.compare(lba, blocks)), buffer)
    }

    /// Makes everything that was written before durable.
    pub fn flush(&self) -> Unit {
        Unit(self.queue.submit(self.namespace.flush(), None))
    }

    /// Has the controller check that `blocks` blocks from `lba` can be read.
    pub fn verify(&self, lba: u64, blocks: u32) -> Unit {
        self.unit(self.namespace.verify(lba, blocks))
    }

    /// Makes `blocks` blocks from `lba` zero; the controller may deallocate them if `deallocate`.
    pub fn write_zeroes(&self, lba: u64, blocks: u32, deallocate: bool) -> Unit {
        self.unit(self.namespace.write_zeroes(lba, blocks, deallocate))
    }

    /// Dataset Management, Deallocate: the data of these ranges (1 to 256) are not needed any more.
    /// What they read as afterwards is the controller's choice.
    pub fn discard(&self, ranges: &[DsmRange]) -> Unit {
        self.with_ranges(self.namespace.deallocate(ranges.len()), ranges.as_bytes())
    }

    /// Has the controller copy the blocks of `sources`, one range after the other, to `to` and what
    /// follows: see [`Namespace::copy`].
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
                // It has room for the most ranges that there may be.
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
