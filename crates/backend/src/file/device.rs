//! What the system says of the device below a file.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;

/// Whether the file is in memory alone.
pub(super) fn is_tmpfs(file: &File) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    rustix::fs::fstatfs(file).is_ok_and(|status| u64::try_from(status.f_type) == Ok(TMPFS_MAGIC))
}

/// Whether the file system asks another machine, or another process, for what is known of the file.
/// These may not answer, and who has asked waits.
pub(super) fn is_remote(file: &File) -> bool {
    /// FUSE, NFS, SMB in its three numbers, 9P, Ceph, AFS, Coda, GFS2, OCFS2, Lustre, GPFS,
    /// OrangeFS, and the shared folders of VirtualBox and VMware.
    const MAGICS: [u32; 16] = [
        0x6573_5546,
        0x6969,
        0x517b,
        0xff53_4d42,
        0xfe53_4d42,
        0x0102_1997,
        0x00c3_6400,
        0x5346_414f,
        0x7375_7245,
        0x0116_1970,
        0x7461_636f,
        0x0bd0_0bd0,
        0x4750_4653,
        0x2003_0528,
        0x786f_4256,
        0xbacb_acbc,
    ];
    // The number has 32 bits, whatever type this system has for it.
    rustix::fs::fstatfs(file).is_ok_and(|about| MAGICS.contains(&(about.f_type as u32)))
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
