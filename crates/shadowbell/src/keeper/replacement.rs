//! Pending recovery by a new server process after a planned kill of the old one.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

/// Pending recovery by a new server process after a planned kill of the old one.
pub(super) struct Replacement {
    /// Program of the new process.
    pub(super) program: PathBuf,
    /// Requester of the upgrade, who receives the result.
    pub(super) asker: Option<OwnedFd>,
    /// Time of the request.
    pub(super) began: Instant,
    /// Time limit for the recovery.
    pub(super) until: Instant,
}
