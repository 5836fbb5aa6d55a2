//! Namespace Management and Namespace Attachment: what a host wants of a pool. Base 2.1, 5.1.20 and
//! 5.1.21; NVM 1.1, 4.1.6.

use super::pool_formats::{BlockFormat, block_format};
use crate::pool::{PoolAct, PoolState, bytes_of};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{NamespaceAttachment, NamespaceManagement};
use shadowbell_spec::identify::{ControllerList, NamespaceToCreate, csi};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use zerocopy::FromBytes;

/// What both commands take from the host.
pub(crate) const DATA: usize = 4096;

const INVALID_FIELD: Status = Status::INVALID_FIELD.with_dnr();
const INVALID_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();

/// A namespace that the command is about: one of the pool's.
///
/// # Errors
/// There is none; or it is not the pool's (`is_given`), but of whoever runs the controller.
pub(crate) fn find(nsid: u32, state: &PoolState, is_given: bool) -> Result<(), Status> {
    if is_given {
        // Nothing of the specification's fits better: the host may use it, and not do away with it.
        return Err(Status::OPERATION_DENIED.with_dnr());
    }
    state.get(nsid).map(drop).ok_or(INVALID_NAMESPACE)
}

/// How many bytes a Namespace Management command takes.
pub(crate) fn data_length(sqe: &Sqe) -> usize {
    let is_creation = NamespaceManagement::decode(sqe).sel == NamespaceManagement::CREATE;
    if is_creation { DATA } else { 0 }
}

/// Namespace Management. `uuid` is the one that a namespace gets; `is_given` says whether there is
/// a namespace of the command's NSID that is not of the pool.
///
/// # Errors
/// The status that the command completes with.
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

/// How many blocks it has, and of which kind.
fn create(wanted: &NamespaceToCreate) -> Result<(u64, BlockFormat), Status> {
    let NamespaceToCreate { nsze, ncap, flbas, dps, nmic, anagrpid, nvmsetid, endgid, .. } =
        *wanted;
    let protection = (dps.pit(), dps.pip());
    let format = block_format(flbas.index(), flbas.extended(), protection)?;
    // It is provisioned as a whole, or not at all: a namespace with less capacity than blocks is
    // refused (Base 2.1, 3.2.1.6, NSFEAT.THINP). Those that are not there are not chosen from.
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

/// Namespace Attachment, to or from the controller `cntlid`, which takes the command and is the
/// only one.
///
/// # Errors
/// The status that the command completes with.
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
    // In ascending order, each once: so there is one place for the only controller.
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
