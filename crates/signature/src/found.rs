//! Result and error of a signature search.

use std::fmt;
use std::io;

/// Signature that was found on a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// True for a partition table, false for a file system or a member of a volume.
    pub is_table: bool,
    /// Name in libblkid: `ext4`, `LVM2_member`, `gpt`.
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

/// Reason why the search failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FindError {
    /// libblkid cannot be loaded.
    #[error("libblkid cannot be loaded: {0}")]
    Library(String),
    /// A system call failed.
    #[error("searching for signatures failed: {0}")]
    System(#[from] io::Error),
}
