//! A keeper that is about to become another program.

use super::say::say;
use super::upgrade::tell_outcome;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

/// How long the answer may take, and how long a moment for the rest may be waited for.
pub(super) const LIMIT: Duration = Duration::from_secs(10);
/// How often it is looked for such a moment.
pub(super) const LOOK: Duration = Duration::from_millis(20);

/// A file, as it is now.
pub(super) type Identity = (u64, u64, i64, i64, u64);

pub(super) fn identity(program: &Path) -> io::Result<Identity> {
    let about = std::fs::metadata(program)?;
    Ok((about.dev(), about.ino(), about.mtime(), about.mtime_nsec(), about.size()))
}

/// A keeper that is about to become another program.
pub(super) struct Renewal {
    pub(super) program: PathBuf,
    /// Who waits for the outcome of the upgrade, and what that is.
    pub(super) asker: Option<OwnedFd>,
    pub(super) outcome: String,
    pub(super) step: Step,
    pub(super) until: Instant,
}

/// How far it is.
pub(super) enum Step {
    Wanted,
    /// The program is asked.
    Asked(Child, Identity),
    /// It can go on.
    Can(Identity),
}

impl Renewal {
    pub(super) fn new(program: PathBuf, asker: Option<OwnedFd>, outcome: String) -> Self {
        Self { program, asker, outcome, step: Step::Wanted, until: Instant::now() + LIMIT }
    }

    /// When there is something to do.
    pub(super) fn deadline(&self) -> Instant {
        match self.step {
            Step::Asked(..) => self.until,
            Step::Wanted | Step::Can(_) => self.until.min(Instant::now() + LOOK),
        }
    }

    /// It does not come to that: the upgrade was one all the same.
    pub(super) fn ends(mut self, why: Option<&str>) {
        if let Step::Asked(child, _) = &mut self.step {
            let _ = child.kill();
            let _ = child.wait();
        }
        let mut outcome = self.outcome;
        if let Some(why) = why {
            say(&format!("warning: the keeper goes on as the program that it is: {why}"));
            outcome += &format!("; its keeper goes on as the program that it is: {why}");
        }
        tell_outcome(self.asker, Ok(&outcome));
    }
}
