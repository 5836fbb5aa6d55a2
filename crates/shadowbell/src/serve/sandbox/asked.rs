//! What was asked for.

use super::user::User;
use std::path::PathBuf;

/// Whether there is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(in crate::serve) enum Mode {
    /// As far as the system and the disks let it.
    #[default]
    Auto,
    /// There is one with all that belongs to it, or no server.
    On,
    /// None.
    Off,
}

/// What was asked for.
#[derive(Clone, Debug, Default)]
pub(in crate::serve) struct Asked {
    pub(in crate::serve) mode: Mode,
    /// Whose process it is to be.
    pub(in crate::serve) user: Option<User>,
    /// Directories in which more may be opened, and sockets made.
    pub(in crate::serve) allow: Vec<PathBuf>,
    /// The configuration file, which may be read again.
    pub(in crate::serve) config: Option<PathBuf>,
}
