//! Recovery options.

use std::time::Duration;

/// Recovery options: permitted reactions to command timeouts and controller failures. See the
/// [module](crate::recovery).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// True to enable recovery. Without recovery, a command that never completes remains
    /// outstanding, and a controller failure fails all commands.
    pub enabled: bool,
    /// Maximum number of further submissions of a command.
    pub repeats: u8,
    /// Interval between status checks of a healthy or idle controller. While a command takes long,
    /// CSTS is read with every tick instead. Each read may wake a process that emulates the
    /// controller.
    pub watch: Duration,
}

impl Recovery {
    /// No recovery.
    pub const OFF: Self = Self { enabled: false, repeats: 0, watch: Duration::MAX };
}

impl Default for Recovery {
    /// Recovery is enabled. A command is submitted again at most 3 times, and the status of a
    /// healthy controller is read every 30 s.
    fn default() -> Self {
        Self { enabled: true, repeats: 3, watch: Duration::from_secs(30) }
    }
}
