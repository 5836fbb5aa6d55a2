//! Properties of the file system or block device below a file.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;

/// True if the file is on a tmpfs.
pub(super) fn is_tmpfs(file: &File) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    rustix::fs::fstatfs(file).is_ok_and(|status| u64::try_from(status.f_type) == Ok(TMPFS_MAGIC))
}

/// True if the file system depends on another machine or process. While that machine or process is
/// unreachable, system calls on the file block the thread.
pub(super) fn is_remote(file: &File) -> bool {
    /// Magic numbers of FUSE, NFS, SMB (three numbers), 9P, Ceph, AFS, Coda, GFS2, OCFS2, Lustre,
    /// GPFS, OrangeFS, and the shared folders of VirtualBox and VMware.
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
    // The magic number has 32 bits, but the type of `f_type` depends on the system.
    rustix::fs::fstatfs(file).is_ok_and(|about| MAGICS.contains(&(about.f_type as u32)))
}

/// Reads a sysfs attribute of a block device.
pub(super) fn attribute(device: &Metadata, name: &str) -> Option<String> {
    attribute_of(device.rdev(), name)
}

/// Reads a sysfs attribute of the block device with this device number.
pub(super) fn attribute_of(device: u64, name: &str) -> Option<String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let value = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{name}")).ok()?;
    Some(value.trim().to_owned())
}
