//! Data pointers in general form: SGLs, and PRPs of commands with flags.

use shadowbell_memory::{Segments, View};
use shadowbell_spec::Sqe;
use shadowbell_spec::sqe::{Fuse, Psdt};
use shadowbell_spec::status::Status;

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

/// Copies a command's data into `list`, with a single read of the host's memory.
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
