//! Run state of a device during migration.

use shadowbell_controller::Announcement;

/// Run state of a device.
#[derive(Debug, Default)]
pub(super) enum Halt {
    /// Running.
    #[default]
    Running,
    /// Stopped; continues with its own state.
    Stopped,
    /// Stopped; continues with the state of the migrated controller.
    Loaded(Announcement),
}

impl Halt {
    pub(super) fn is_running(&self) -> bool {
        matches!(self, Self::Running)
    }
}
