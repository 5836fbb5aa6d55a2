//! Options of the sandbox.

use super::user::User;
use std::path::PathBuf;

/// Mode of the sandbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(in crate::serve) enum Mode {
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
pub(in crate::serve) struct Asked {
    pub(in crate::serve) mode: Mode,
    /// User that the process becomes.
    pub(in crate::serve) user: Option<User>,
    /// Directories in which images may be opened and sockets created.
    pub(in crate::serve) allow: Vec<PathBuf>,
    /// Configuration file, which may be reloaded.
    pub(in crate::serve) config: Option<PathBuf>,
}
