//! Run state of a device during migration.

use super::migrated_state::Parsed;
use shadowbell_controller::Announcement;
use std::sync::mpsc::Receiver;

/// Run state of a device.
#[derive(Debug, Default)]
pub(super) enum Halt {
    /// Running.
    #[default]
    Running,
    /// Stopped. If the device runs again, it continues with its own state.
    Stopped,
    /// Stopped, while another thread parses the state that was migrated to the device.
    Parsing(Receiver<Result<Parsed, String>>),
    /// Stopped. If the device runs again, it continues with the state that was migrated to it.
    Loaded(Announcement),
}

impl Halt {
    pub(super) fn is_running(&self) -> bool {
        matches!(self, Self::Running)
    }
}
