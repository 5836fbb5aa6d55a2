//! An upgrade that is under way.

use super::say::say;
use super::worker::{Left, Worker};
use crate::keeper_link::{self, answer};
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Step {
    /// The new one prepares.
    Preparing,
    /// The old one hands over, or not.
    HandingOver,
    /// The old one hands over one controller after the other, and can not go on with all any more.
    Moving,
    /// The old one can not go on any more.
    Committed,
}

/// An upgrade that is under way.
pub(super) struct Upgrade {
    pub(super) new: Worker,
    /// The old worker's end of the socket between the two, until it is given to it.
    pub(super) transfer: Option<UnixStream>,
    /// The other end, until the new one has it.
    pub(super) its: Option<UnixStream>,
    pub(super) step: Step,
    pub(super) began: Instant,
    pub(super) until: Instant,
    /// Who waits for the outcome.
    pub(super) asker: Option<OwnedFd>,
    /// Why the new one was ended.
    pub(super) why: Option<String>,
    /// The new one goes on for a part: what both have left counts.
    pub(super) is_shared: bool,
    /// What the old one has left, if it has ended; until the new one has taken over.
    pub(super) left: Option<Left>,
}

/// Tells who asked for an upgrade what came of it; the log, if nobody did.
pub(super) fn tell_outcome(asker: Option<OwnedFd>, outcome: Result<&str, &str>) {
    let (letter, text) = match outcome {
        Ok(text) => (answer::YES, text),
        Err(why) => {
            say(&format!("warning: no upgrade: {why}"));
            (answer::NO, why)
        }
    };
    if let Some(asker) = asker {
        let _ = keeper_link::send(asker, letter, text, None);
    }
}
