//! Pending exec of a new program by the supervisor.

use super::log::log_line;
use super::upgrade_progress::send_outcome;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// Time limit for the new program's answer, and then for the wait until no upgrade, restart or
/// message is pending.
pub(super) const LIMIT: Duration = Duration::from_secs(10);
/// Interval at which the supervisor checks if the next step is possible.
pub(super) const POLL: Duration = Duration::from_millis(20);

/// Device, inode, modification time and size of a file, by which a replaced file is detected.
pub(super) type Identity = (u64, u64, i64, i64, u64);

pub(super) fn identity(program: &Path) -> io::Result<Identity> {
    let about = std::fs::metadata(program)?;
    Ok((about.dev(), about.ino(), about.mtime(), about.mtime_nsec(), about.size()))
}

/// Pending exec of a new program by the supervisor.
pub(super) struct PendingExec {
    pub(super) program: PathBuf,
    /// Connection to the requester of the upgrade, for `outcome`.
    pub(super) asker: Option<OwnedFd>,
    pub(super) outcome: String,
    pub(super) step: Step,
    pub(super) until: Instant,
}

/// Progress of a pending exec.
pub(super) enum Step {
    Wanted,
    /// The program was started to check the snapshot.
    Requested(Child, Identity),
    /// The program accepts the snapshot.
    Can(Identity),
}

impl PendingExec {
    pub(super) fn new(program: PathBuf, asker: Option<OwnedFd>, outcome: String) -> Self {
        Self { program, asker, outcome, step: Step::Wanted, until: Instant::now() + LIMIT }
    }

    /// Time of the next step.
    pub(super) fn deadline(&self) -> Instant {
        match self.step {
            Step::Requested(..) => self.until,
            Step::Wanted | Step::Can(_) => self.until.min(Instant::now() + POLL),
        }
    }

    /// Gives up the exec, for the reason `why` if there is one. Reports to the requester that the
    /// upgrade of the server process has succeeded, and that the supervisor continues with the old
    /// program.
    pub(super) fn ends(mut self, why: Option<&str>) {
        if let Step::Requested(child, _) = &mut self.step {
            let _ = child.kill();
            let _ = child.wait();
        }
        let mut outcome = self.outcome;
        if let Some(why) = why {
            log_line(&format!("warning: the supervisor keeps running the old program: {why}"));
            outcome += &format!("; its supervisor keeps running the old program: {why}");
        }
        send_outcome(self.asker, Ok(&outcome));
    }
}
