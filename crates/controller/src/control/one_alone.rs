//! Who wants to be alone, and who is: see `alone`.

use crate::uncorrectable::Uncorrectable;
use std::sync::Arc;

/// What is under way of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Nothing,
    /// Workers let what is under way end.
    Pausing,
    /// One has its turn; those in `left` come after it.
    Turns,
    /// What has changed is being recorded, and then written down that it is.
    Recording,
}

/// Who wants to be alone, and who is.
#[derive(Debug, Default)]
pub(super) struct OneAlone {
    pub(super) is_wanted: bool,
    pub(super) stage: Stage,
    /// Workers that may have queues of the controller.
    pub(super) workers: Vec<usize>,
    pub(super) left: Vec<usize>,
    /// Which blocks were marked before.
    pub(super) marks: Arc<Uncorrectable>,
}

impl OneAlone {
    /// Whether nobody wants it.
    pub(super) fn is_quiet(&self) -> bool {
        !self.is_wanted && self.stage == Stage::Nothing
    }

    /// A worker has a command that has to be alone.
    pub(super) fn want(&mut self) {
        self.is_wanted = true;
    }
}
