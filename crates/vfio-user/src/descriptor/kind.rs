//! Detection of a descriptor's type.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, BorrowedFd};

use super::sys::has_size;

/// Type of a usable descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Event,
    Memory,
}

/// File systems that keep their data in memory or on local disks. Not in the list: network file
/// systems, file systems with a user-space daemon, and layers above other file systems.
const LOCAL: [&str; 12] = [
    "tmpfs",
    "devtmpfs",
    "ramfs",
    "hugetlbfs",
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "f2fs",
    "bcachefs",
    "zfs",
];

/// Maximum length of a line in `fdinfo` and `mountinfo`, in bytes.
const LONGEST: u64 = 64 * 1024;

/// Type of `fd`. The error describes an unusable descriptor. If `fd` is a file and `may_search` is
/// true, looks up the mount of the file, and clears `may_search`, because a look-up may be slow.
pub(super) fn kind(fd: BorrowedFd<'_>, may_search: &mut bool) -> Result<Kind, String> {
    // Only memory files have seals, and the kernel returns them without calling a file system.
    if rustix::fs::fcntl_get_seals(fd).is_ok() {
        return Ok(Kind::Memory);
    }
    let number = fd.as_raw_fd();
    let link = std::fs::read_link(format!("/proc/self/fd/{number}"))
        .map_err(|error| format!("a descriptor that cannot be found in /proc ({error})"))?;
    let link = link.to_string_lossy();
    if link == "anon_inode:[eventfd]" {
        return Ok(Kind::Event);
    }
    // Only files are looked up in `fdinfo`, because for other types a read of `fdinfo` may block.
    // For an epoll instance, for example, it takes a lock that a peer may hold while it waits for
    // its FUSE daemon.
    if !link.starts_with('/') || !has_size(fd) {
        return Err(format!("a descriptor of {link:?}"));
    }
    if !std::mem::take(may_search) {
        return Err(format!("several files at once, {link:?} among them"));
    }
    let info = File::open(format!("/proc/self/fdinfo/{number}"));
    let mount = info.ok().and_then(|info| mount_of(info.take(LONGEST)));
    let mount = mount.ok_or_else(|| format!("the file {link:?} of an unknown mount"))?;
    let mounts = File::open("/proc/self/mountinfo")
        .map_err(|error| format!("the file {link:?}, and the mounts are unknown ({error})"))?;
    match type_of(mount, BufReader::new(mounts)) {
        Some(name) if LOCAL.contains(&name.as_str()) => Ok(Kind::Memory),
        Some(name) => Err(format!("the file {link:?} of file system type {name}")),
        None => Err(format!("the file {link:?} of a mount that is not visible here")),
    }
}

/// Mount identifier in `fdinfo`.
fn mount_of(info: impl Read) -> Option<u64> {
    let lines = BufReader::new(info).lines().map_while(Result::ok);
    let mut found = lines.filter_map(|line| Some(line.strip_prefix("mnt_id:")?.trim().parse()));
    found.next()?.ok()
}

/// File system type of `mount` in `mountinfo`.
fn type_of(mount: u64, mut mounts: impl BufRead) -> Option<String> {
    // Line format: "36 35 98:0 /root /mount/point options optional... - type source options"
    let mut line = Vec::new();
    loop {
        line.clear();
        if mounts.by_ref().take(LONGEST).read_until(b'\n', &mut line).ok()? == 0 {
            return None;
        }
        let text = String::from_utf8_lossy(&line);
        let (id, rest) = text.split_once(' ')?;
        if id.parse() == Ok(mount) {
            // Blanks in names are escaped, so the first dash between blanks is the separator.
            let (_, rest) = rest.split_once(" - ")?;
            return rest.split_whitespace().next().map(str::to_owned);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::epoll;
    use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
    use std::os::fd::{AsFd, OwnedFd};

    fn kind_of(fd: impl AsFd) -> Result<Kind, String> {
        kind(fd.as_fd(), &mut true)
    }

    fn file(path: &str, flags: OFlags) -> OwnedFd {
        open(path, flags | OFlags::CLOEXEC, Mode::from_raw_mode(0o600)).unwrap()
    }

    /// True if the mount of `file` is in `mountinfo`. In a plain chroot (of a build daemon) it is
    /// not: its files are on a mount outside of the chroot.
    fn is_visible(file: &File) -> bool {
        let info = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
        let mount = mount_of(File::open(info).unwrap()).unwrap();
        type_of(mount, BufReader::new(File::open("/proc/self/mountinfo").unwrap())).is_some()
    }

    #[test]
    fn memory_and_events_pass() {
        let huge = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        for flags in [MemfdFlags::empty(), MemfdFlags::ALLOW_SEALING, huge] {
            // The name imitates an eventfd.
            let fd = memfd_create("anon_inode:[eventfd]", flags).unwrap();
            assert_eq!(kind_of(fd), Ok(Kind::Memory));
        }
        let flags = rustix::event::EventfdFlags::empty();
        assert_eq!(kind_of(rustix::event::eventfd(0, flags).unwrap()), Ok(Kind::Event));
        // In a plain chroot, `/dev/shm` may be an ordinary directory on a disk.
        if let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm")
            && is_visible(file.as_file())
        {
            assert_eq!(kind_of(file), Ok(Kind::Memory));
        }
    }

    #[test]
    fn other_descriptors_are_neither_memory_nor_eventfds() {
        let (reader, _writer) = rustix::pipe::pipe().unwrap();
        let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        for (fd, word) in [
            (reader, "pipe:"),
            (socket.into(), "socket:"),
            (epoll, "[eventpoll]"),
            (file("/dev/null", OFlags::RDWR), "/dev/null"),
            (file("/proc/self/maps", OFlags::RDONLY), "proc"),
            (file("/", OFlags::PATH), "\"/\""),
        ] {
            let error = kind_of(fd).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn files_are_classified_by_their_mount() {
        let path = env!("CARGO_MANIFEST_DIR");
        let directory = File::open(path).unwrap();
        let stat = std::process::Command::new("stat").args(["-f", "-c", "%T", path]).output();
        let Ok(stat) = stat else { return };
        let name = String::from_utf8_lossy(&stat.stdout).trim().replace("ext2/ext3", "ext4");
        let expected = LOCAL.contains(&name.as_str());
        let mut may_search = true;
        let first = kind(directory.as_fd(), &mut may_search);
        if is_visible(&directory) {
            assert_eq!(first.is_ok(), expected, "{first:?} on {name}");
        } else {
            assert!(first.unwrap_err().contains("not visible here"));
        }
        let second = kind(directory.as_fd(), &mut may_search).unwrap_err();
        assert!(second.contains("several"), "{second}");
    }

    #[test]
    fn mounts_are_found_by_their_number() {
        let info = "pos:\t0\nflags:\t0100002\nmnt_id:\t36\nino:\t7\n";
        assert_eq!(mount_of(info.as_bytes()), Some(36));
        for bad in ["", "mnt_id:\tx\n", "pos:\t0\n", "mnt_id:\t-1\n"] {
            assert_eq!(mount_of(bad.as_bytes()), None, "{bad:?}");
        }
        let mounts = b"22 27 0:21 / /proc rw,relatime - proc proc rw\n\
            36 35 98:0 /a\\040-\\040b /c\xff rw shared:1 master:2 - ext4 /dev/x rw - tmpfs\n\
            37 35 0:9 / /d rw - fuse.sshfs me@there: rw\n";
        let find = |mount| type_of(mount, &mounts[..]);
        assert_eq!(find(22).as_deref(), Some("proc"));
        assert_eq!(find(36).as_deref(), Some("ext4"));
        assert_eq!(find(37).as_deref(), Some("fuse.sshfs"));
        assert_eq!(find(3), None);
        assert_eq!(type_of(36, &b"36 nothing else\n"[..]), None);
    }
}
