//! Commands that have failed, for the error log.

use crate::exec::CompletedCommand;
use crate::notice::{ControlHandle, Notice};
use shadowbell_spec::Sqe;
use shadowbell_spec::status::Status;

/// A command has failed where it was fetched.
#[cold]
pub(crate) fn report_error(control: &ControlHandle, sqid: u16, sqe: &Sqe, status: Status) {
    let (cid, nsid, lba) = (sqe.cid, sqe.nsid, sqe.cdw10_11());
    control.notify(Notice::CommandError { sqid, cid, status, nsid, lba });
}

/// A command that was in flight has failed.
#[cold]
pub(crate) fn report_ended(control: &ControlHandle, sqid: u16, ended: &CompletedCommand) {
    let &CompletedCommand { cid, status, nsid, lba, .. } = ended;
    control.notify(Notice::CommandError { sqid, cid, status, nsid, lba });
}
