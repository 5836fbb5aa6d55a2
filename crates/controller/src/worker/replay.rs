//! Commands that were under way in a process that is dead.

use crate::journal::RecoveredCommand;

/// A command that was under way in a process that is dead.
pub(crate) struct Replay {
    /// Index of its submission queue.
    pub(crate) sq: usize,
    pub(crate) command: RecoveredCommand,
    /// Its record in the journal, until it has another.
    pub(crate) spare: u32,
}
