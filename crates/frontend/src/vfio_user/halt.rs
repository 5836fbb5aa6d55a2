//! Run state of a device during migration.

use shadowbell_controller::Announcement;

/// Run state of a device.
#[derive(Debug, Default)]
pub(super) enum Halt {
    /// Running.
    #[default]
    Running,
    /// Stopped. If it runs again, it continues with its own state.
    Stopped,
    /// Stopped. If it runs again, it continues with the state that was migrated to it.
    Loaded(Announcement),
}

impl Halt {
    pub(super) fn is_running(&self) -> bool {
        matches!(self, Self::Running)
    }
}
