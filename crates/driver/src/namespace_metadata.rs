//! Namespace commands that transfer metadata or specify protection information explicitly.

use crate::command::Command;
use crate::error::RequestError;
use crate::metadata::MetadataCommand;
use crate::namespace::Namespace;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::protection::ProtectionFields;

impl Namespace {
    /// Read with metadata: `blocks` blocks from `lba` into the buffer. [`MetadataCommand`]
    /// describes the layout of the buffer; `fields` select the checks of protection information.
    ///
    /// # Errors
    /// As [`read`](Self::read), and [`RequestError::NoMetadata`].
    pub fn read_with_metadata(
        &self,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        self.with_metadata(NvmOpcode::Read, lba, blocks, fields)
    }

    /// Write with metadata: `blocks` blocks from the buffer to `lba`.
    ///
    /// # Errors
    /// As [`read_with_metadata`](Self::read_with_metadata).
    pub fn write_with_metadata(
        &self,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        self.with_metadata(NvmOpcode::Write, lba, blocks, fields)
    }

    /// Compare with metadata: compares `blocks` blocks from `lba` with the buffer, and their
    /// metadata as far as the controller compares metadata. PRACT is not defined for Compare.
    ///
    /// # Errors
    /// As [`read_with_metadata`](Self::read_with_metadata).
    pub fn compare_with_metadata(
        &self,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        self.with_metadata(NvmOpcode::Compare, lba, blocks, fields)
    }

    /// Verify: the controller checks the protection information of `blocks` blocks from `lba` as
    /// `fields` specify, without a data transfer.
    ///
    /// # Errors
    /// As [`read_with_metadata`](Self::read_with_metadata), but without a transfer limit.
    pub fn verify_with_metadata(
        &self,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        let command = self.without_data(NvmOpcode::Verify, lba, blocks)?;
        self.of_metadata(command, lba, blocks, fields)
    }

    fn with_metadata(
        &self,
        opcode: NvmOpcode,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        let command = self.without_data(opcode, lba, blocks)?;
        let command = self.of_metadata(command, lba, blocks, fields)?;
        let most = command.max_blocks_of(self.max_bytes);
        if u64::from(blocks) > most {
            let bytes = u64::from(blocks) * u64::from(self.block_size());
            return Err(RequestError::TooLong { bytes, max: most * u64::from(self.block_size()) });
        }
        Ok(command.with_transfer_length())
    }

    fn of_metadata(
        &self,
        command: Command,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        let format =
            self.metadata().copied().ok_or(RequestError::NoMetadata { nsid: self.nsid() })?;
        let size = self.block_size();
        Ok(MetadataCommand::new(command, format, fields, (lba, blocks), size))
    }
}
