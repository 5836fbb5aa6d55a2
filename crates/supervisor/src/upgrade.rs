//! State of a running upgrade.

use super::log::log_line;
use super::worker::{Left, Worker};
use crate::protocol::{self, answer};
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Progress of an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Step {
    /// The new process prepares.
    Preparing,
    /// The old process hands over, or resumes.
    HandingOver,
    /// The old process has moved a part of its controllers, and cannot resume all of them.
    Moving,
    /// The old process has committed and cannot resume.
    Committed,
}

/// A running upgrade.
pub(super) struct Upgrade {
    pub(super) new: Worker,
    /// Old process's end of the socket between the two, until it was sent to it.
    pub(super) transfer: Option<UnixStream>,
    /// New process's end of that socket, until it was sent to it.
    pub(super) its: Option<UnixStream>,
    pub(super) step: Step,
    pub(super) began: Instant,
    pub(super) until: Instant,
    /// Requester, who receives the result.
    pub(super) asker: Option<OwnedFd>,
    /// Reason for a kill of the new process.
    pub(super) why: Option<String>,
    /// The new process serves a part of the controllers: the checkpoints of both are valid.
    pub(super) is_shared: bool,
    /// Checkpoint of the old process after its exit, until the new one has recovered.
    pub(super) left: Option<Left>,
}

/// Sends an upgrade's result to its requester. A failure is logged as well.
pub(super) fn tell_outcome(asker: Option<OwnedFd>, outcome: Result<&str, &str>) {
    let (letter, text) = match outcome {
        Ok(text) => (answer::YES, text),
        Err(why) => {
            log_line(&format!("warning: no upgrade: {why}"));
            (answer::NO, why)
        }
    };
    if let Some(asker) = asker {
        let _ = protocol::send(asker, letter, text, None);
    }
}
