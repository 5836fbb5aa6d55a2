//! What was found, or why it can not be told.

use std::fmt;
use std::io;

/// What a disk holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// A partition table, and not a file system or a part of a volume.
    pub is_table: bool,
    /// What libblkid calls it: `ext4`, `LVM2_member`, `gpt`.
    pub name: String,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.is_table {
            true => write!(f, "a partition table ({})", self.name),
            false => f.write_str(&self.name),
        }
    }
}

/// Why it can not be told.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FindError {
    /// There is no libblkid.
    #[error("libblkid can not be loaded: {0}")]
    Library(String),
    /// The system's.
    #[error("looking for signatures: {0}")]
    System(#[from] io::Error),
}
