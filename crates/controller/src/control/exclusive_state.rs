//! State of exclusive command execution; see `exclusive`.

use crate::uncorrectable::Uncorrectable;
use std::sync::Arc;

/// Stage of a round of exclusive commands.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Nothing,
    /// I/O threads are finishing commands in flight.
    Pausing,
    /// An I/O thread is executing its exclusive commands; those in `left` follow.
    Turns,
    /// Changes are being checkpointed, and then outcomes written to the journal.
    Recording,
}

/// State of exclusive command execution.
#[derive(Debug, Default)]
pub(super) struct Exclusive {
    pub(super) is_wanted: bool,
    pub(super) stage: Stage,
    /// I/O threads that may have queues of the controller.
    pub(super) workers: Vec<usize>,
    pub(super) left: Vec<usize>,
    /// Blocks marked as uncorrectable before the round.
    pub(super) marks: Arc<Uncorrectable>,
}

impl Exclusive {
    /// True if no exclusive command is waiting or running.
    pub(super) fn is_quiet(&self) -> bool {
        !self.is_wanted && self.stage == Stage::Nothing
    }

    /// Requests a round, because an I/O thread has an exclusive command.
    pub(super) fn want(&mut self) {
        self.is_wanted = true;
    }
}
