//! Format NVM: changes the block format and erases the contents. Base 2.1, 5.1.10; NVM 1.1, 4.1.2.

use super::namespace_management::find;
use super::pool_formats::{BlockFormat, block_format};
use crate::pool::{PoolAct, PoolState, bytes_of};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::FormatNvm;
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;

/// Secure Erase Settings. Without secure erase, contents are erased as well.
const NO_ERASE: u8 = 0;
const USER_DATA_ERASE: u8 = 1;

/// Decodes and checks a Format NVM command. `is_given` is as for
/// [`management`](super::namespace_management::management); `given` is true if the controller has
/// any namespace outside the pool.
///
/// # Errors
/// The completion status of the command.
pub(crate) fn format(
    sqe: &Sqe,
    state: &PoolState,
    (is_given, given): (bool, bool),
) -> Result<PoolAct, Status> {
    let command = FormatNvm::decode(sqe);
    let protection = (command.pi, command.pil);
    let BlockFormat { block_size, metadata } =
        block_format(command.lbaf, command.mset, protection)?;
    let least = bytes_of(1, block_size, metadata.as_ref()).unwrap_or(u64::MAX);
    if !matches!(command.ses, NO_ERASE | USER_DATA_ERASE) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let nsids = if sqe.nsid == NSID_ALL {
        // All attached namespaces are formatted, but namespaces outside the pool cannot be.
        if given {
            return Err(Status::OPERATION_DENIED.with_dnr());
        }
        let attached = state.namespaces.iter().filter(|namespace| namespace.attached);
        attached.map(|namespace| namespace.nsid).collect()
    } else {
        find(sqe.nsid, state, is_given)?;
        vec![sqe.nsid]
    };
    for namespace in state.namespaces.iter().filter(|ns| nsids.contains(&ns.nsid)) {
        if namespace.bytes() < least {
            return Err(Status::INVALID_FORMAT.with_dnr());
        }
    }
    Ok(PoolAct::Format { nsids, block_size, metadata })
}
