//! Whether a device runs.

use shadowbell_controller::Announcement;

/// How far a device is from running.
#[derive(Debug, Default)]
pub(super) enum Halt {
    /// It runs.
    #[default]
    Running,
    /// It does not, and goes on as it was.
    Stopped,
    /// It does not, and goes on as another one was.
    Loaded(Announcement),
}

impl Halt {
    pub(super) fn is_running(&self) -> bool {
        matches!(self, Self::Running)
    }
}
