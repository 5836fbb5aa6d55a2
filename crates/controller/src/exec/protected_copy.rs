//! What a Copy has to do with metadata. NVM 1.1, "Copy command".

use super::namespace::NamespaceQueue;
use super::with_metadata::{fields, uses_extended};
use crate::admin::host_behavior::EXTENDED_FORMATS;
use shadowbell_backend::{Metadata, MetadataBuffer, MetadataFormat};
use shadowbell_spec::nvm::{CopyFields, CopyRange, LongCopyRange, PRINFO_PRACT};
use shadowbell_spec::protection::ProtectionFields;
use shadowbell_spec::sqe::Sqe;
use shadowbell_spec::status::Status;
use zerocopy::FromBytes;

/// For a namespace whose blocks have metadata.
pub(super) struct Protection {
    format: MetadataFormat,
    prinfor: u8,
    is_long: bool,
    write: ProtectionFields,
}

impl Protection {
    /// Of a command, if the blocks of its namespace have metadata. All of them are copied; those
    /// that are protection information are made anew, if the command says so.
    ///
    /// # Errors
    /// The command has ended with this.
    pub(super) fn of_copy(
        namespace: &NamespaceQueue,
        sqe: &Sqe,
        copy: &CopyFields,
        enabled: u16,
    ) -> Result<Option<Self>, Status> {
        let Some(format) = namespace.metadata() else { return Ok(None) };
        let is_long = copy.desfmt & 1 != 0;
        if format.protection != 0 {
            if uses_extended(format) && enabled & EXTENDED_FORMATS == 0 {
                return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
            }
            // Formats 0h and 2h have tags for guards of 16 bits, the others for longer ones.
            if is_long != format.wide_guard {
                return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
            }
            if (copy.prinfor ^ copy.prinfow) & PRINFO_PRACT != 0 {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
        }
        let write = fields(format, sqe, (copy.prinfow, copy.sdlba))?;
        Ok(Some(Self { format: *format, prinfor: copy.prinfor, is_long, write }))
    }

    /// Bytes of the metadata of so many blocks.
    pub(super) fn len(&self, blocks: u64) -> u64 {
        blocks * u64::from(self.format.size)
    }

    /// For reading a source range.
    ///
    /// # Errors
    /// Invalid Protection Information.
    pub(super) fn source(&self, entry: &[u8], range: &CopyRange) -> Result<Metadata, Status> {
        let format = &self.format;
        let mut read = ProtectionFields {
            // Nothing is stripped: what is inserted instead is made when it is written.
            prinfo: self.prinfor & !PRINFO_PRACT,
            app_tag: range.apptag,
            app_mask: range.apptag_mask,
            ref_tag: range.reftag.into(),
        };
        if self.is_long {
            let range = LongCopyRange::read_from_prefix(entry).map_err(|_| Status::INTERNAL)?.0;
            let tag = range.elbt.iter().fold(0, |tag, byte| tag << 8 | u64::from(*byte));
            read.ref_tag = tag & format.guard().ref_mask();
            (read.app_tag, read.app_mask) = (range.apptag, range.apptag_mask);
        }
        if format.protection == 0 {
            read = ProtectionFields::default();
        } else {
            read.check(format.protection, format.guard(), range.slba)?;
        }
        Ok(Metadata { fields: read, buffer: MetadataBuffer::Behind })
    }

    /// For writing the first block of the destination.
    pub(super) fn destination(&self) -> Metadata {
        Metadata { fields: self.write, buffer: MetadataBuffer::Behind }
    }
}
