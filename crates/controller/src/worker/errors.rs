//! Reports of failed commands to the Error Information log.

use crate::exec::CompletedCommand;
use crate::notice::{ControlHandle, Notice};
use shadowbell_spec::Sqe;
use shadowbell_spec::status::Status;

/// Reports a command that failed when it was fetched.
#[cold]
pub(crate) fn report_error(control: &ControlHandle, sqid: u16, sqe: &Sqe, status: Status) {
    let (cid, nsid, lba) = (sqe.cid, sqe.nsid, sqe.cdw10_11());
    control.notify(Notice::CommandError { sqid, cid, status, nsid, lba });
}

/// Reports a command that failed after it was in flight.
#[cold]
pub(crate) fn report_ended(control: &ControlHandle, sqid: u16, ended: &CompletedCommand) {
    let &CompletedCommand { cid, status, nsid, lba, .. } = ended;
    control.notify(Notice::CommandError { sqid, cid, status, nsid, lba });
}
