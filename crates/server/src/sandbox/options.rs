//! Options of the sandbox.

use super::user::User;

/// Mode of the sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Mode {
    /// As far as the system and the disks permit.
    #[default]
    Auto,
    /// All restrictions, or an error.
    On,
    /// No sandbox.
    Off,
}

/// Options of the sandbox.
#[derive(Clone, Debug, Default)]
pub(crate) struct SandboxOptions {
    pub(crate) mode: Mode,
    /// User that the server process becomes.
    pub(crate) user: Option<User>,
}
