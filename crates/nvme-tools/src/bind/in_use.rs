//! Detection of kernel users of a controller's block devices: mounts, swap, device mapper, RAID.

use super::kernel::KernelPaths;
use rustix::fs::{Mode, OFlags};
use shadowbell_driver::PciFunction;
use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;

/// Block devices of a controller: its namespaces and their partitions.
pub(super) fn disks(paths: &KernelPaths, function: &PciFunction) -> io::Result<BTreeSet<String>> {
    let mut disks = BTreeSet::new();
    for controller in PciFunction::names_in(&function.directory().join("nvme"))? {
        for name in PciFunction::names_in(&function.directory().join("nvme").join(controller))? {
            if let Some(disk) = disk_name(&name) {
                disks.insert(disk);
            }
        }
    }
    let mut all = disks.clone();
    for disk in disks {
        for name in PciFunction::names_in(&paths.block(&disk))? {
            // sysfs has a directory per partition below that of its disk, with a file `partition`.
            if name.starts_with(&disk) && paths.block(&disk).join(&name).join("partition").exists()
            {
                all.insert(name);
            }
        }
    }
    Ok(all)
}

/// Name of the block device for an entry of sysfs: `nvme0n1` for `nvme0n1`, and for the path
/// `nvme0c1n1` of a multipath namespace. `None` if the entry is no namespace.
fn disk_name(name: &str) -> Option<String> {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let (controller, namespace) = name.strip_prefix("nvme")?.rsplit_once('n')?;
    let subsystem = match controller.split_once('c') {
        Some((subsystem, path)) if number(path) => subsystem,
        Some(_) => return None,
        None => controller,
    };
    (number(subsystem) && number(namespace)).then(|| format!("nvme{subsystem}n{namespace}"))
}

/// Sentences about the use of these block devices by the kernel; empty if they are unused.
pub(super) fn uses(paths: &KernelPaths, disks: &BTreeSet<String>) -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    let mounts = mounts(&fs::read_to_string(paths.proc.join("self/mountinfo"))?);
    let swaps = swaps(&fs::read_to_string(paths.proc.join("swaps"))?);
    for disk in disks {
        let numbers = fs::read_to_string(paths.block(disk).join("dev")).unwrap_or_default();
        let path = format!("/dev/{disk}");
        for mount in &mounts {
            if mount.source == path || mount.numbers == numbers.trim() {
                found.push(format!("{disk} is mounted at {}", mount.mount_point));
            }
        }
        if swaps.contains(&path) {
            found.push(format!("{disk} is active swap space"));
        }
        for holder in PciFunction::names_in(&paths.block(disk).join("holders"))? {
            let name = fs::read_to_string(paths.block(&holder).join("dm/name"));
            let name = name.map(|name| format!(" ({})", name.trim())).unwrap_or_default();
            found.push(format!("{disk} is part of {holder}{name}"));
        }
    }
    Ok(found)
}

/// Opens the block devices exclusively (`O_EXCL`), so that none can be mounted while the returned
/// descriptors live. The kernel refuses with `EBUSY` if a device has a user that [`uses`] cannot
/// detect: a mount in another mount namespace, or a ZFS pool.
pub(super) fn open_exclusively(
    paths: &KernelPaths,
    disks: &BTreeSet<String>,
) -> io::Result<Result<Vec<OwnedFd>, String>> {
    let mut claims = Vec::new();
    // Only whole disks are opened: an exclusive open of a disk fails while a partition has a user,
    // and this process could not open the partitions after their disk.
    for disk in disks.iter().filter(|disk| !paths.block(disk).join("partition").exists()) {
        let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
        match rustix::fs::open(paths.dev.join(disk), flags, Mode::empty()) {
            Ok(claim) => claims.push(claim),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NXIO) => {}
            Err(rustix::io::Errno::BUSY) => {
                return Ok(Err(format!("{disk} is opened exclusively by another user")));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Ok(claims))
}

/// Line of `/proc/PID/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    /// `MAJOR:MINOR` of the file system's device.
    numbers: String,
    mount_point: String,
    source: String,
}

/// Parses `/proc/PID/mountinfo`; see proc_pid_mountinfo(5).
fn mounts(text: &str) -> Vec<Mount> {
    let parse = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(2);
        let numbers = left.next()?.to_owned();
        let mount_point = unescape(left.nth(1)?);
        let source = unescape(right.split(' ').nth(1)?);
        Some(Mount { numbers, mount_point, source })
    };
    text.lines().filter_map(parse).collect()
}

/// Parses `/proc/swaps`: a heading, then lines that begin with a path.
fn swaps(text: &str) -> Vec<String> {
    text.lines().skip(1).filter_map(|line| line.split_whitespace().next()).map(unescape).collect()
}

/// Decodes paths of procfs, in which blanks and backslashes are octal escapes such as `\040`.
fn unescape(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let value = after.get(..3).filter(|_| first == b'\\').and_then(|digits| {
            let octal = |value: u32, d: &u8| {
                (b'0'..=b'7').contains(d).then(|| value * 8 + u32::from(d - b'0'))
            };
            u8::try_from(digits.iter().try_fold(0, octal)?).ok()
        });
        rest = if value.is_some() { after.get(3..).unwrap_or_default() } else { after };
        bytes.push(value.unwrap_or(first));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sysfs_entries_of_namespaces_are_recognized() {
        for (name, disk) in [
            ("nvme0n1", Some("nvme0n1")),
            ("nvme12c3n45", Some("nvme12n45")),
            ("nvme0", None),
            ("ng0n1", None),
            ("nvme0n1p1", None),
            ("nvme0cxn1", None),
            ("nvmen", None),
            ("hwmon3", None),
            ("power", None),
        ] {
            assert_eq!(disk_name(name).as_deref(), disk, "{name}");
        }
    }

    #[test]
    fn blanks_in_paths_are_decoded() {
        let text = "22 1 259:1 / /mnt/my\\040disk rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw\n\
                    23 1 0:25 / /home rw - btrfs /dev/nvme0n1p2 rw,subvol=/\n\
                    nonsense\n24 1 - x\n25 1 0:1 - a\n";
        let found = mounts(text);
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(
            (found[0].numbers.as_str(), found[0].mount_point.as_str()),
            ("259:1", "/mnt/my disk")
        );
        assert_eq!(found[1].source, "/dev/nvme0n1p2");
        let text = "Filename Type Size Used Priority\n/dev/nvme0n1p3 partition 8 0 -2\n";
        assert_eq!(swaps(text), ["/dev/nvme0n1p3"]);
        assert!(swaps("").is_empty());
        assert_eq!(unescape("a\\134b\\"), "a\\b\\");
        assert_eq!(unescape("\\999\\777\\0"), "\\999\\777\\0");
    }
}
