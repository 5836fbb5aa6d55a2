//! State of a request for blocks with metadata.

use super::cache::Versions;
use super::checks::{Blocks, Scratch};
use super::layout::{Layout, Location};
use super::locks::Claim;
use shadowbell_disk::{DiskError, Metadata, MetadataBuffer, Op, Request};
use shadowbell_memory::{Mapping, Segments, SharedBytes};
use shadowbell_spec::nvm::{PRINFO_APPTAG, PRINFO_GUARD, PRINFO_REFTAG};

/// Stage of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Waits for earlier requests on the same blocks.
    Waiting,
    /// Reads the block of the disk below that will hold the metadata, because it also holds
    /// metadata of other logical blocks.
    Reading,
    /// Data and metadata are in flight.
    Moving,
}

/// Request on a disk with metadata.
#[derive(Debug)]
pub(super) struct Task {
    /// Serial number, never reused by the queue.
    pub(super) serial: u64,
    pub(super) request: Request,
    pub(super) metadata: Metadata,
    /// Buffer of the host's request.
    pub(super) data: Segments,
    pub(super) location: Location,
    pub(super) stage: Stage,
    /// Buffer for the stored metadata.
    pub(super) stored: Option<SharedBytes>,
    /// Versions of the cache lines before the read of the stored metadata. `Some` while that read
    /// is in flight.
    pub(super) versions: Option<Versions>,
    /// True if a write of the metadata has started.
    pub(super) has_written: bool,
    /// Number of requests in flight at the disk below.
    pub(super) left: u8,
    pub(super) outcome: Result<(), DiskError>,
}

/// Kind of access to the disk below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transfer {
    /// Passes the request to the disk below unchanged, without access to metadata.
    Plain,
    Read,
    /// Compares the data and reads the metadata.
    Compare,
    Write,
    /// Zeroes the data and writes the metadata.
    Zero,
}

impl Task {
    pub(super) fn new(
        serial: u64,
        request: &Request,
        metadata: &Metadata,
        layout: &Layout,
        data: Segments,
    ) -> Self {
        let block = u64::from(layout.block_size);
        Self {
            serial,
            request: *request,
            metadata: *metadata,
            data,
            location: layout.locate(request.offset / block, request.len / block),
            stage: Stage::Waiting,
            stored: None,
            versions: None,
            has_written: false,
            left: 0,
            outcome: Ok(()),
        }
    }

    pub(super) fn transfer(&self, layout: &Layout) -> Transfer {
        const CHECKS: u8 = PRINFO_GUARD | PRINFO_APPTAG | PRINFO_REFTAG;
        let checks = layout.format.protection != 0 && self.metadata.fields.prinfo & CHECKS != 0;
        match self.request.op {
            Op::Read => Transfer::Read,
            Op::Verify if checks => Transfer::Read,
            Op::Compare => Transfer::Compare,
            Op::Write { .. } => Transfer::Write,
            Op::WriteZeroes { .. } | Op::Discard => Transfer::Zero,
            Op::Flush | Op::Verify => Transfer::Plain,
            // These operations are refused, by this layer or by the disk below.
            Op::CompareAndWrite { .. } | Op::Append { .. } | Op::Zone { .. } => Transfer::Plain,
        }
    }

    /// Blocks to lock for the request.
    pub(super) fn claim(&self, layout: &Layout) -> Claim {
        let block = u64::from(layout.block_size);
        let (offset, len) = (self.request.offset, self.request.len);
        Claim {
            blocks: offset / block..(offset + len) / block,
            around: layout.around(&self.location),
            writes: matches!(self.transfer(layout), Transfer::Write | Transfer::Zero),
        }
    }

    /// Buffer of the stored metadata, in whole blocks of the disk below.
    pub(super) fn stored_data(&self, into: &mut Segments) -> Result<(), DiskError> {
        let len = (self.location.to - self.location.from) as usize;
        let stored = self.stored.as_ref().and_then(|stored| stored.slice(0, len));
        into.set_bytes(&stored.ok_or(DiskError::BadBuffer)?);
        Ok(())
    }

    /// True if the buffer of the request can be passed to the disk below directly. It ignores
    /// metadata that follow all data in the buffer.
    pub(super) fn is_direct(&self) -> bool {
        self.metadata.buffer != MetadataBuffer::Extended
    }

    /// Allocates a buffer for a Verify that has to check the data, because the host provides none.
    pub(super) fn provide(&mut self, layout: &Layout) -> Result<(), DiskError> {
        if self.request.op == Op::Verify && self.transfer(layout) == Transfer::Read {
            let mapping = Mapping::anonymous(self.request.len).map_err(|_| DiskError::Io(12))?;
            self.data = Segments::from_bytes(&mapping.bytes());
        }
        Ok(())
    }

    /// Adds the data in the host's buffer to `into`, for the disk below, without the metadata after
    /// each block (extended LBA).
    pub(super) fn select(&self, layout: &Layout, into: &mut Segments) -> Result<(), DiskError> {
        let (len, block) = (self.request.len as usize, layout.block_size as usize);
        let stride = block + usize::from(layout.format.size);
        let selected = self.data.select((0, block), stride, len / block, into);
        selected.ok_or(DiskError::BadBuffer)
    }

    pub(super) fn blocks<'a>(
        &'a self,
        layout: &'a Layout,
        scratch: &'a mut Scratch,
    ) -> Result<Blocks<'a>, DiskError> {
        let block_size = layout.block_size as usize;
        Ok(Blocks {
            format: &layout.format,
            metadata: &self.metadata,
            block_size,
            count: self.request.len as usize / block_size,
            data: &self.data,
            stored: self.stored.as_ref().ok_or(DiskError::BadBuffer)?,
            at: self.location.at,
            scratch,
        })
    }
}
