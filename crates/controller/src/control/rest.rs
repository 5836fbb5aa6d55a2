//! A controller at rest, so that another process can go on with it.
//!
//! On the way there it first comes to a point at which none of its admin commands is under way and
//! nobody waits for it. I/O goes on until then. Then its queues leave their workers: nothing more
//! is fetched, and what the disks have in hand ends. Whoever wants to be told is told, and what the
//! controller is can be written down. It can also go on here, from any of these steps.

use super::deferred::Callback;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// At work.
    Working,
    /// No admin command is begun any more; those under way end.
    Asked,
    /// The queues leave their workers.
    Leaving,
    /// At rest.
    Resting,
    /// It was called off while the queues left: those that have come back, first.
    Returning,
}

/// Whether the controller is at rest, and who waits for that.
pub(super) struct Rest {
    pub(super) step: Step,
    /// Are called when it is at rest, or dropped when that is called off.
    pub(super) waiting: Vec<Callback>,
}

impl Rest {
    pub(super) fn new() -> Self {
        Self { step: Step::Working, waiting: Vec::new() }
    }
}
