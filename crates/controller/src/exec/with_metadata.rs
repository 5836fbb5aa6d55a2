//! What the commands of an engine share that may have to do with metadata.

use super::quota::cost;
use super::spans::TouchedSpans;
use shadowbell_backend::{Metadata, MetadataFormat, Queue, Request, Submitted};
use shadowbell_memory::Segments;
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::protection::ProtectionFields;
use shadowbell_spec::status::Status;

/// Hands a request to a disk, with what it has to do with metadata, if it has any.
pub(super) fn submit_any(
    queue: &mut dyn Queue,
    tag: u32,
    request: &Request,
    metadata: Option<&Metadata>,
    data: &mut Segments,
) -> Submitted {
    match metadata {
        None => queue.submit(tag, request, data),
        Some(metadata) => queue.submit_with_metadata(tag, request, metadata, data),
    }
}

/// Whether blocks of this format are only for hosts that know of such.
pub(super) fn uses_extended(format: &MetadataFormat) -> bool {
    format.wide_guard && format.protection != 0
}

/// The reference tag that a command says.
fn reference_tag(sqe: &Sqe, format: &MetadataFormat) -> u64 {
    // The upper part of the tags: CDW3 has the part below CDW2's.
    let tag = u64::from(sqe.cdw3) << 32 | u64::from(sqe.cdw14);
    tag & format.guard().ref_mask()
}

/// What a command says of protection information, as far as there is any, with these bits of PRINFO
/// and this first block.
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

/// How much the pieces of a command's data count among those that are in use, and how many places
/// of the host's memory are touched for them. A fresh one counts as many as `weight` says, if that
/// is counted.
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
