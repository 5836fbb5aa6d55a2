//! Helpers for commands with or without metadata.

use super::quota::cost;
use super::spans::TouchedSpans;
use shadowbell_backend::{Metadata, MetadataFormat, Queue, Request, Submitted};
use shadowbell_memory::Segments;
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::RwFields;
use shadowbell_spec::protection::ProtectionFields;
use shadowbell_spec::status::Status;

/// Submits a request to a disk, with metadata parameters if there are any.
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

/// True if a format is an extended one: only for hosts that have enabled LBAFEE.
pub(super) fn uses_extended(format: &MetadataFormat) -> bool {
    format.wide_guard && format.protection != 0
}

/// Reference tag of a command.
fn reference_tag(sqe: &Sqe, format: &MetadataFormat) -> u64 {
    // CDW3 has the upper bits of tags that are wider than 32 bits.
    let tag = u64::from(sqe.cdw3) << 32 | u64::from(sqe.cdw14);
    tag & format.guard().ref_mask()
}

/// Protection parameters of a command with these PRINFO bits and this first block; zero for a
/// format without protection information.
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

/// Quota weight of a command's data pieces, and the number of memory locations touched for them.
/// If touches are counted, a piece in a new span has the weight `weight`.
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
