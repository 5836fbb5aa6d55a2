//! State of quiesce, which precedes the transfer of a controller to another process.
//!
//! The controller first waits until no admin command is in flight and no other operation is
//! pending; I/O continues meanwhile. Then its queues leave their I/O threads: no further command
//! is fetched, and requests in flight at the disks end. When quiesced, the callbacks are called,
//! and the controller can be saved. A quiesce can be cancelled in every step.

use super::deferred::Callback;

/// Step of quiesce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Running.
    Running,
    /// Quiesce requested: no admin command is started, and those in flight end.
    Requested,
    /// Queues are leaving their I/O threads.
    Leaving,
    /// Quiesced.
    Quiesced,
    /// Cancelled while queues were leaving: those that have left return.
    Returning,
}

/// Quiesce state and waiting callbacks.
pub(super) struct Quiesce {
    pub(super) step: Step,
    /// Callbacks, called when the controller is quiesced, or dropped when the quiesce is cancelled.
    pub(super) waiting: Vec<Callback>,
}

impl Quiesce {
    pub(super) fn new() -> Self {
        Self { step: Step::Running, waiting: Vec::new() }
    }
}
