//! A worker that is to go on for one that was ended for it.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

/// A worker that is to go on for one that was ended for it.
pub(super) struct Replacement {
    /// Its program.
    pub(super) program: PathBuf,
    /// Who waits for the outcome.
    pub(super) asker: Option<OwnedFd>,
    /// When the upgrade was asked for.
    pub(super) began: Instant,
    /// Until when it has to go on.
    pub(super) until: Instant,
}
