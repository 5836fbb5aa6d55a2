//! A command that says everything there is to say of metadata and protection information.

use super::format::BlockMetadata;
use crate::command::Command;
use crate::dma::Buffer;
use shadowbell_spec::Status;
use shadowbell_spec::nvm::PRINFO_PRACT;
use shadowbell_spec::protection::ProtectionFields;
use thiserror::Error;

/// The dwords of an entry that a plain [`Command`] does not have, and where the metadata are in
/// its buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tags {
    pub(crate) cdw2_3: u64,
    pub(crate) cdw14_15: u64,
    /// Where in the buffer they begin, and how many bytes they are.
    pub(crate) metadata: Option<(u32, u32)>,
}

impl Tags {
    /// The upper part of the reference tag is in CDW3, below a storage tag that CDW2 would have.
    pub(crate) fn new(fields: &ProtectionFields) -> Self {
        let app = u64::from(fields.app_tag) | u64::from(fields.app_mask) << 16;
        let tags = Self::of(fields.ref_tag);
        Self { cdw14_15: tags.cdw14_15 | app << 32, ..tags }
    }

    /// Of a reference tag alone.
    pub(crate) fn of(tag: u64) -> Self {
        Self { cdw2_3: tag >> 32 << 32, cdw14_15: tag & u64::from(u32::MAX), metadata: None }
    }
}

/// An I/O command with what it says of metadata: made by
/// [`Namespace::read_with_metadata`](crate::Namespace::read_with_metadata) and others.
///
/// Its buffer has the data, and if the namespace's blocks are extended, each block's metadata right
/// behind the block. Otherwise the metadata are behind all data, or where
/// [`metadata_at`](Self::metadata_at) says. With PRACT, metadata that are protection information
/// alone are nowhere: the controller inserts and strips them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataCommand {
    pub(crate) command: Command,
    format: BlockMetadata,
    fields: ProtectionFields,
    lba: u64,
    blocks: u32,
    block_size: u32,
    /// Where in the buffer separate metadata are, if not behind the data.
    place: Option<u32>,
}

impl MetadataCommand {
    /// `command`, which moves `blocks` blocks from `lba` on, and has PRINFO and its bytes still to
    /// be set.
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
        Self { command, format, fields, lba, blocks, block_size, place: None }
    }

    /// Bytes of a block in the data, with metadata that are there. `moves` is whether metadata are
    /// transferred at all.
    fn step(&self) -> u64 {
        let own = if self.format.extended && !self.strips() { self.format.size } else { 0 };
        u64::from(self.block_size) + u64::from(own)
    }

    /// Whether metadata are not transferred.
    fn strips(&self) -> bool {
        self.fields.prinfo & PRINFO_PRACT != 0 && self.format.is_protection_alone()
    }

    /// The most blocks of such a command that moves `bytes` of data.
    pub(crate) fn most_blocks(&self, bytes: u64) -> u64 {
        bytes / self.step()
    }

    /// With the bytes that it moves.
    pub(crate) fn moving(mut self) -> Self {
        // Fewer than a command may move, which fits.
        self.command.set_transfer((u64::from(self.blocks) * self.step()) as u32);
        self
    }

    /// Bytes of data that it moves, with the metadata of extended blocks.
    #[must_use]
    pub fn transfer_bytes(&self) -> u32 {
        self.command.transfer_bytes()
    }

    /// Bytes of metadata in a place of their own.
    #[must_use]
    pub fn metadata_bytes(&self) -> u32 {
        let moves = self.transfer_bytes() != 0 && !self.format.extended && !self.strips();
        if moves { self.blocks.saturating_mul(self.format.size.into()) } else { 0 }
    }

    /// Where in the buffer these begin.
    #[must_use]
    pub fn metadata_offset(&self) -> u32 {
        self.place.unwrap_or(self.command.offset.saturating_add(self.transfer_bytes()))
    }

    /// Bytes that its buffer needs, with what comes before the data.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        let data = self.command.offset as usize + self.transfer_bytes() as usize;
        match self.metadata_bytes() as usize {
            0 => data,
            own => data.max(self.metadata_offset() as usize + own),
        }
    }

    /// This command with its data `offset` bytes into the buffer, a multiple of 4.
    #[must_use]
    pub const fn at(mut self, offset: u32) -> Self {
        self.command = self.command.at(offset);
        self
    }

    /// This command with separate metadata `offset` bytes into the buffer, a multiple of 4.
    #[must_use]
    pub const fn metadata_at(mut self, offset: u32) -> Self {
        self.place = Some(offset);
        self
    }

    /// This command with Force Unit Access: see [`Command::with_fua`].
    #[must_use]
    pub const fn with_fua(mut self) -> Self {
        self.command = self.command.with_fua();
        self
    }

    /// This command, never to be submitted a second time by the driver: see [`Command::once`].
    #[must_use]
    pub const fn once(mut self) -> Self {
        self.command = self.command.once();
        self
    }

    /// What it says beside the command.
    pub(crate) fn tags(&self) -> Tags {
        let own = self.metadata_bytes();
        let metadata = (own != 0).then(|| (self.metadata_offset(), own));
        Tags { metadata, ..Tags::new(&self.fields) }
    }

    /// Where a block and its metadata are in the buffer.
    fn places(&self, nth: u32) -> (usize, usize) {
        let data = u64::from(self.command.offset) + u64::from(nth) * self.step();
        let own = if self.format.extended {
            data + u64::from(self.block_size)
        } else {
            u64::from(self.metadata_offset()) + u64::from(nth) * u64::from(self.format.size)
        };
        (data as usize, own as usize)
    }

    /// Makes the protection information of every block in the buffer, with the tags of the command:
    /// for a write whose protection information the host makes. Nothing if there is none in the
    /// buffer. `false` if the buffer is too short.
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
            let (data_at, own_at) = self.places(nth);
            if !buffer.copy_to(data_at, &mut data) || !buffer.copy_to(own_at, &mut own) {
                return false;
            }
            self.format.protect(&data, &mut own, &self.fields, nth.into());
            buffer.copy_from(own_at, &own)
        })
    }

    /// Checks the protection information of every block in the buffer, as PRCHK of the command
    /// says: for a read whose protection information the host checks. Success if there is none in
    /// the buffer.
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
            let (data_at, own_at) = self.places(nth);
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

/// What the host found that has checked protection information.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ProtectionError {
    /// The buffer does not have what the command has moved.
    #[error("the command's data and metadata are {needed} bytes, and the buffer has {len}")]
    Buffer {
        /// What there would have to be.
        needed: usize,
        /// What there is.
        len: usize,
    },
    /// A block is not what its protection information says.
    #[error("block {lba}: {status}")]
    Block {
        /// The block.
        lba: u64,
        /// What a controller would say.
        status: Status,
    },
}
