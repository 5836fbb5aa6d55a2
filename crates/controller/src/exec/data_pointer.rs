//! Data pointers in general form (SGLs, and PRPs of commands with flags), metadata and protection
//! information of commands.

use super::namespace::NamespaceQueue;
use super::quota::{TouchedSpans, cost};
use crate::admin::features::EXTENDED_FORMATS;
use shadowbell_disk::{Metadata, MetadataBuffer, MetadataFormat};
use shadowbell_memory::{Segments, View};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::{CopyFields, CopyRange, LongCopyRange, PRINFO_PRACT, RwFields};
use shadowbell_spec::protection::ProtectionFields;
use shadowbell_spec::sqe::{Fuse, Psdt};
use shadowbell_spec::status::Status;
use zerocopy::FromBytes;

/// Resolves the data pointer of a command, `len` bytes, as PRPs or as an SGL according to PSDT.
#[inline(never)]
pub(super) fn resolve_flagged(
    view: &View,
    sqe: &Sqe,
    len: usize,
    page: usize,
    write: bool,
    into: &mut Segments,
) -> Result<(), Status> {
    if sqe.fuse() != Fuse::Normal {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    match sqe.psdt() {
        Psdt::Prp => view.resolve_prps(sqe.prp1(), sqe.prp2(), len, page, write, into),
        Psdt::SglContiguousMetadata | Psdt::SglSegmentMetadata => {
            view.resolve_sgl(&sqe.dptr, len, write, into)
        }
        Psdt::Reserved => return Err(Status::INVALID_FIELD.with_dnr()),
    }
    .map_err(|e| e.status())
}

/// Copies a command's data into `list`. Host memory is read only once, because the host may change
/// it after the checks.
pub(super) fn read_list(
    view: &View,
    sqe: &Sqe,
    page: usize,
    scratch: &mut Segments,
    list: &mut [u8],
) -> Result<(), Status> {
    resolve_flagged(view, sqe, list.len(), page, false, scratch)?;
    let copied = scratch.read_into(0, list);
    scratch.clear();
    copied.ok_or(Status::INTERNAL)
}

/// True if the host must enable extended LBA formats (LBAFEE) before it uses this format.
pub(super) fn uses_extended(format: &MetadataFormat) -> bool {
    format.wide_guard && format.protection != 0
}

/// Reference tag of a command.
fn reference_tag(sqe: &Sqe, format: &MetadataFormat) -> u64 {
    // CDW3 has the upper bits of tags that are wider than 32 bits.
    let tag = u64::from(sqe.cdw3) << 32 | u64::from(sqe.cdw14);
    tag & format.guard().ref_mask()
}

/// Protection parameters of a command with the given PRINFO bits and first block. They are zero if
/// the format has no protection information.
///
/// # Errors
/// Invalid Protection Information.
pub(super) fn fields(
    format: &MetadataFormat,
    sqe: &Sqe,
    (prinfo, slba): (u8, u64),
) -> Result<ProtectionFields, Status> {
    if format.protection == 0 {
        return Ok(ProtectionFields::default());
    }
    let rw = RwFields::decode(sqe);
    let fields = ProtectionFields {
        prinfo,
        app_tag: rw.apptag,
        app_mask: rw.apptag_mask,
        ref_tag: reference_tag(sqe, format),
    };
    fields.check(format.protection, format.guard(), slba)?;
    Ok(fields)
}

/// Quota weight of a command's data, and the number of memory locations that are touched for it.
/// Each piece of memory weighs 1. Each span (the memory that one page table maps) that was not
/// touched before adds `weight - 1`. With `None`, touches are not counted. The cost of the pieces
/// is charged to `budget`.
pub(super) fn weigh_pieces(
    data: &Segments,
    spans: &mut TouchedSpans,
    budget: &mut i64,
    weight: Option<usize>,
    sqe: &Sqe,
) -> (usize, usize) {
    let pieces = data.pieces().len();
    *budget -= cost::of_pieces(pieces);
    let Some(weight) = weight else { return (pieces, 0) };
    let fresh = spans.touch(data.pieces().iter().map(|piece| (piece.address(), piece.len())));
    let places = fresh + if sqe.flags == 0 { 0 } else { data.lists() };
    (pieces + fresh * (weight - 1), places)
}

/// Protection parameters of a Copy to a namespace with metadata. NVM 1.1, "Copy command".
pub(super) struct Protection {
    format: MetadataFormat,
    prinfor: u8,
    is_long: bool,
    write: ProtectionFields,
}

impl Protection {
    /// Decodes the parameters; `None` for a namespace without metadata. A Copy copies all metadata,
    /// but with PRACT it generates new protection information.
    ///
    /// # Errors
    /// The status with which the command ends.
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
            // Entries of formats 0h and 2h have tags for 16-bit guards; those of 1h and 3h, for
            // wider guards.
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

    /// Bytes of metadata of `blocks` blocks.
    pub(super) fn len(&self, blocks: u64) -> u64 {
        blocks * u64::from(self.format.size)
    }

    /// Metadata parameters for reading a source range.
    ///
    /// # Errors
    /// Invalid Protection Information.
    pub(super) fn source(&self, entry: &[u8], range: &CopyRange) -> Result<Metadata, Status> {
        let format = &self.format;
        let mut read = ProtectionFields {
            // The read keeps all metadata. With PRACT, the write generates new protection
            // information.
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

    /// Metadata parameters for writing the first block of the destination.
    pub(super) fn destination(&self) -> Metadata {
        Metadata { fields: self.write, buffer: MetadataBuffer::Behind }
    }
}
