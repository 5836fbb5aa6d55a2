//! What the system says of the device below a file.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;

/// Whether the file is in memory alone.
pub(super) fn is_tmpfs(file: &File) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    rustix::fs::fstatfs(file).is_ok_and(|status| u64::try_from(status.f_type) == Ok(TMPFS_MAGIC))
}

/// What the system says of a block device.
pub(super) fn attribute(device: &Metadata, name: &str) -> Option<String> {
    attribute_of(device.rdev(), name)
}

/// What the system says of the block device with this number.
pub(super) fn attribute_of(device: u64, name: &str) -> Option<String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let value = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{name}")).ok()?;
    Some(value.trim().to_owned())
}
