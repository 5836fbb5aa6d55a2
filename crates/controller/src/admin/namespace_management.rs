//! Namespace Management and Namespace Attachment of a pool. Base 2.1, 5.1.20 and 5.1.21; NVM 1.1,
//! 4.1.6.

use super::pool_formats::{BlockFormat, block_format};
use crate::pool::{PoolAct, PoolState, bytes_of};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{NamespaceAttachment, NamespaceManagement};
use shadowbell_spec::identify::{ControllerList, NamespaceToCreate, csi};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use zerocopy::FromBytes;

/// Bytes of data that both commands transfer from the host.
pub(crate) const DATA: usize = 4096;

const INVALID_FIELD: Status = Status::INVALID_FIELD.with_dnr();
const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();

/// Checks that namespace `nsid` belongs to the pool.
///
/// # Errors
/// Invalid Namespace or Format if it does not exist; Operation Denied if it belongs to the
/// controller's own configuration (`is_given`).
pub(crate) fn find(nsid: u32, state: &PoolState, is_given: bool) -> Result<(), Status> {
    if is_given {
        // The closest status in the specification: the host may use the namespace, not delete it.
        return Err(Status::OPERATION_DENIED.with_dnr());
    }
    state.get(nsid).map(drop).ok_or(INVALID_NAMESPACE)
}

/// Number of bytes that a Namespace Management command transfers from the host.
pub(crate) fn data_length(sqe: &Sqe) -> usize {
    let is_creation = NamespaceManagement::decode(sqe).sel == NamespaceManagement::CREATE;
    if is_creation { DATA } else { 0 }
}

/// Decodes and checks Namespace Management. A created namespace gets `uuid`; `is_given` is true if
/// the command's NSID belongs to a namespace outside the pool.
///
/// # Errors
/// The completion status of the command.
pub(crate) fn management(
    sqe: &Sqe,
    data: Option<&[u8]>,
    state: &PoolState,
    (uuid, is_given): ([u8; 16], bool),
) -> Result<PoolAct, Status> {
    let command = NamespaceManagement::decode(sqe);
    match command.sel {
        NamespaceManagement::CREATE => {
            if command.csi != csi::NVM {
                return Err(Status::INVALID_IO_COMMAND_SET.with_dnr());
            }
            let wanted = data.and_then(|data| NamespaceToCreate::read_from_bytes(data).ok());
            let wanted = wanted.ok_or(Status::INTERNAL)?;
            let (blocks, BlockFormat { block_size, metadata }) = create(&wanted)?;
            let bytes = bytes_of(blocks, block_size, metadata.as_ref());
            if bytes.is_none_or(|bytes| bytes > state.unallocated()) {
                return Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr());
            }
            Ok(PoolAct::Create { uuid, blocks, block_size, metadata })
        }
        NamespaceManagement::DELETE if sqe.nsid == NSID_ALL => {
            Ok(PoolAct::Delete(state.namespaces.iter().map(|namespace| namespace.nsid).collect()))
        }
        NamespaceManagement::DELETE => {
            find(sqe.nsid, state, is_given)?;
            Ok(PoolAct::Delete(vec![sqe.nsid]))
        }
        _ => Err(INVALID_FIELD),
    }
}

/// Decodes number of blocks and block format of a namespace to create.
fn create(wanted: &NamespaceToCreate) -> Result<(u64, BlockFormat), Status> {
    let NamespaceToCreate { nsze, ncap, flbas, dps, nmic, anagrpid, nvmsetid, endgid, .. } =
        *wanted;
    let protection = (dps.pit(), dps.pip());
    let format = block_format(flbas.index(), flbas.extended(), protection)?;
    // Thin provisioning is not supported: a capacity below the size is refused (Base 2.1, 3.2.1.6,
    // NSFEAT.THINP). Groups and sets do not exist, so their identifiers must be 0.
    if nsze != ncap {
        return Err(Status::THIN_PROVISIONING_NOT_SUPPORTED.with_dnr());
    }
    let is_plain = dps.into_bits() >> 4 == 0 && nmic.into_bits() == 0;
    let has_no_group = anagrpid == 0 && nvmsetid == 0 && endgid == 0;
    if nsze == 0 || !is_plain || !has_no_group {
        return Err(INVALID_FIELD);
    }
    Ok((nsze, format))
}

/// Decodes and checks Namespace Attachment. `cntlid` is the controller that processes the command,
/// and the only one.
///
/// # Errors
/// The completion status of the command.
pub(crate) fn attachment(
    sqe: &Sqe,
    data: Option<&[u8]>,
    state: &PoolState,
    (cntlid, is_given, is_again): (u16, bool, bool),
) -> Result<PoolAct, Status> {
    let command = NamespaceAttachment::decode(sqe);
    let list = data.and_then(|data| ControllerList::read_from_bytes(data).ok());
    let list = list.ok_or(Status::INTERNAL)?;
    find(sqe.nsid, state, is_given)?;
    let is_attached = state.get(sqe.nsid).is_some_and(|namespace| namespace.attached);
    let act = match command.sel {
        NamespaceAttachment::ATTACH => PoolAct::Attach(sqe.nsid),
        NamespaceAttachment::DETACH => PoolAct::Detach(sqe.nsid),
        _ => return Err(INVALID_FIELD),
    };
    // The list is ascending without duplicates, so the only controller is its only entry.
    if list.count != 1 || list.cntlids.first() != Some(&cntlid) {
        return Err(Status::CONTROLLER_LIST_INVALID.with_dnr());
    }
    match act {
        PoolAct::Attach(_) if is_attached && !is_again => {
            Err(Status::NAMESPACE_ALREADY_ATTACHED.with_dnr())
        }
        PoolAct::Detach(_) if !is_attached && !is_again => {
            Err(Status::NAMESPACE_NOT_ATTACHED.with_dnr())
        }
        act => Ok(act),
    }
}
