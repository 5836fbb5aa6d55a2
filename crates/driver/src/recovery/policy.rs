//! What the program allows the driver to do about a controller that does wrong.

use std::time::Duration;

/// What may be done about a controller that does not do what it should. See the
/// [module](crate::recovery).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// Whether anything is done. If not, a command that is never completed stays outstanding, and a
    /// controller that fails fails everything.
    pub enabled: bool,
    /// How often a command is submitted again before it is given up.
    pub repeats: u8,
    /// How often the controller's status is read while commands complete, or there are none.
    /// (While one does not complete, it is read with every tick.) Each read may wake a process that
    /// emulates the controller.
    pub watch: Duration,
}

impl Recovery {
    /// Nothing is done.
    pub const OFF: Self = Self { enabled: false, repeats: 0, watch: Duration::MAX };
}

impl Default for Recovery {
    /// Enabled; a command is submitted again 3 times at most, and the status of a controller that
    /// seems well is read every 30 s.
    fn default() -> Self {
        Self { enabled: true, repeats: 3, watch: Duration::from_secs(30) }
    }
}
