//! I/O commands that transfer metadata or specify protection information explicitly.

use super::format::BlockMetadata;
use crate::command::Command;
use crate::dma::Buffer;
use shadowbell_spec::Status;
use shadowbell_spec::nvm::PRINFO_PRACT;
use shadowbell_spec::protection::ProtectionFields;
use thiserror::Error;

/// CDW2, CDW3, CDW14 and CDW15 of a submission queue entry (the tags of protection information),
/// which [`Command`] does not have, and the position of the metadata in the buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tags {
    pub(crate) cdw2_3: u64,
    pub(crate) cdw14_15: u64,
    /// Offset and length of separate metadata in the buffer.
    pub(crate) metadata: Option<(u32, u32)>,
}

impl Tags {
    /// Encodes `fields` as tag dwords. CDW3 has the upper part of the reference tag. CDW2, for
    /// storage tags, is zero.
    pub(crate) fn new(fields: &ProtectionFields) -> Self {
        let app = u64::from(fields.app_tag) | u64::from(fields.app_mask) << 16;
        let tags = Self::of(fields.ref_tag);
        Self { cdw14_15: tags.cdw14_15 | app << 32, ..tags }
    }

    /// Creates tag dwords with only a reference tag.
    pub(crate) fn of(tag: u64) -> Self {
        Self { cdw2_3: tag >> 32 << 32, cdw14_15: tag & u64::from(u32::MAX), metadata: None }
    }
}

/// An I/O command with metadata and explicit protection information. Created by
/// [`Namespace::read_with_metadata`](crate::Namespace::read_with_metadata) and similar methods.
///
/// The buffer holds the data. With extended blocks, each block is followed by its metadata. With
/// separate metadata, all metadata follow the data, or are at [`metadata_at`](Self::metadata_at).
/// With PRACT, metadata that consist of protection information alone are not transferred: the
/// controller inserts and strips them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataCommand {
    pub(crate) command: Command,
    format: BlockMetadata,
    fields: ProtectionFields,
    lba: u64,
    blocks: u32,
    block_size: u32,
    /// Offset of separate metadata in the buffer. `None` if they follow the data.
    explicit_offset: Option<u32>,
}

impl MetadataCommand {
    /// Creates a command for `blocks` blocks from `lba` on. Sets PRINFO. The transfer length is set
    /// with [`with_transfer_length`](Self::with_transfer_length).
    pub(crate) fn new(
        command: Command,
        format: BlockMetadata,
        fields: ProtectionFields,
        (lba, blocks): (u64, u32),
        block_size: u32,
    ) -> Self {
        let fields = match format.protection() {
            0 => ProtectionFields::default(),
            _ => ProtectionFields { ref_tag: fields.ref_tag & format.guard().ref_mask(), ..fields },
        };
        let command = command.with_prinfo(fields.prinfo).with_given_tags();
        Self { command, format, fields, lba, blocks, block_size, explicit_offset: None }
    }

    /// Distance of consecutive blocks in the buffer, in bytes: the block size, plus transferred
    /// metadata of an extended block.
    fn step(&self) -> u64 {
        let own = if self.format.extended && !self.strips() { self.format.size } else { 0 };
        u64::from(self.block_size) + u64::from(own)
    }

    /// True if the controller inserts and strips the metadata, so that they are not transferred.
    fn strips(&self) -> bool {
        self.fields.prinfo & PRINFO_PRACT != 0 && self.format.is_protection_only()
    }

    /// The maximum number of blocks of a command that transfers at most `bytes` bytes of data. The
    /// metadata of extended blocks count as data.
    pub(crate) fn max_blocks_of(&self, bytes: u64) -> u64 {
        bytes / self.step()
    }

    /// Sets the transfer length in bytes, from the number of blocks.
    pub(crate) fn with_transfer_length(mut self) -> Self {
        // The product fits into 32 bits, because the caller has checked the transfer limit.
        self.command.set_transfer((u64::from(self.blocks) * self.step()) as u32);
        self
    }

    /// The transferred bytes of data, including the metadata of extended blocks.
    #[must_use]
    pub fn transfer_bytes(&self) -> u32 {
        self.command.transfer_bytes()
    }

    /// The transferred bytes of separate metadata.
    #[must_use]
    pub fn metadata_bytes(&self) -> u32 {
        let moves = self.transfer_bytes() != 0 && !self.format.extended && !self.strips();
        if moves { self.blocks.saturating_mul(self.format.size.into()) } else { 0 }
    }

    /// The offset of separate metadata in the buffer.
    #[must_use]
    pub fn metadata_offset(&self) -> u32 {
        self.explicit_offset.unwrap_or(self.command.offset.saturating_add(self.transfer_bytes()))
    }

    /// The minimum length of the buffer, including the bytes before the data.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        let data = self.command.offset as usize + self.transfer_bytes() as usize;
        match self.metadata_bytes() as usize {
            0 => data,
            own => data.max(self.metadata_offset() as usize + own),
        }
    }

    /// Sets the offset of the data in the buffer, a multiple of 4.
    #[must_use]
    pub const fn at(mut self, offset: u32) -> Self {
        self.command = self.command.at(offset);
        self
    }

    /// Sets the offset of separate metadata in the buffer, a multiple of 4.
    #[must_use]
    pub const fn metadata_at(mut self, offset: u32) -> Self {
        self.explicit_offset = Some(offset);
        self
    }

    /// Sets Force Unit Access: see [`Command::with_fua`].
    #[must_use]
    pub const fn with_fua(mut self) -> Self {
        self.command = self.command.with_fua();
        self
    }

    /// Forbids the driver to submit the command a second time: see [`Command::once`].
    #[must_use]
    pub const fn once(mut self) -> Self {
        self.command = self.command.once();
        self
    }

    /// Tag dwords of the command, and the position of separate metadata in the buffer.
    pub(crate) fn tags(&self) -> Tags {
        let own = self.metadata_bytes();
        let metadata = (own != 0).then(|| (self.metadata_offset(), own));
        Tags { metadata, ..Tags::new(&self.fields) }
    }

    /// Offsets of a block and of its metadata in the buffer.
    fn block_offsets(&self, nth: u32) -> (usize, usize) {
        let data = u64::from(self.command.offset) + u64::from(nth) * self.step();
        let own = if self.format.extended {
            data + u64::from(self.block_size)
        } else {
            u64::from(self.metadata_offset()) + u64::from(nth) * u64::from(self.format.size)
        };
        (data as usize, own as usize)
    }

    /// Generates the protection information of every block in the buffer, with the tags of the
    /// command. Used for a write whose protection information the host generates. The method has no
    /// effect if the command transfers no protection information. Returns `false` if the buffer is
    /// too short.
    #[must_use = "nothing is made if the buffer is too short"]
    pub fn protect(&self, buffer: &mut Buffer) -> bool {
        if self.buffer_bytes() > buffer.len() {
            return false;
        }
        if self.strips() || self.transfer_bytes() == 0 {
            return true;
        }
        let mut data = vec![0; self.block_size as usize];
        let mut own = vec![0; usize::from(self.format.size)];
        (0..self.blocks).all(|nth| {
            let (data_at, own_at) = self.block_offsets(nth);
            if !buffer.copy_to(data_at, &mut data) || !buffer.copy_to(own_at, &mut own) {
                return false;
            }
            self.format.protect(&data, &mut own, &self.fields, nth.into());
            buffer.copy_from(own_at, &own)
        })
    }

    /// Checks the protection information of every block in the buffer, as selected by PRCHK of the
    /// command. Used for a read whose protection information the host checks. The check succeeds if
    /// the command transfers no protection information.
    ///
    /// # Errors
    /// [`ProtectionError`].
    pub fn check(&self, buffer: &Buffer) -> Result<(), ProtectionError> {
        let short = ProtectionError::Buffer { needed: self.buffer_bytes(), len: buffer.len() };
        if self.buffer_bytes() > buffer.len() {
            return Err(short);
        }
        if self.strips() || self.transfer_bytes() == 0 {
            return Ok(());
        }
        let mut data = vec![0; self.block_size as usize];
        let mut own = vec![0; usize::from(self.format.size)];
        for nth in 0..self.blocks {
            let (data_at, own_at) = self.block_offsets(nth);
            if !buffer.copy_to(data_at, &mut data) || !buffer.copy_to(own_at, &mut own) {
                return Err(short);
            }
            let checked = self.format.check(&data, &own, &self.fields, nth.into());
            let lba = self.lba + u64::from(nth);
            checked.map_err(|status| ProtectionError::Block { lba, status })?;
        }
        Ok(())
    }
}

/// Failure of the host's check of protection information.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProtectionError {
    /// The buffer is shorter than the transferred data and metadata.
    #[error("the command's data and metadata are {needed} bytes, and the buffer has {len}")]
    Buffer {
        /// Minimum length of the buffer in bytes.
        needed: usize,
        /// Length of the buffer in bytes.
        len: usize,
    },
    /// A block does not match its protection information.
    #[error("block {lba}: {status}")]
    Block {
        /// LBA of the block.
        lba: u64,
        /// Status with which a controller would fail the same check.
        status: Status,
    },
}
