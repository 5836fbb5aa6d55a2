//! Mount of a FUSE file, with the privileges of the calling process.
//!
//! Without the privilege to mount, the program `fusermount3` mounts and passes the descriptor of
//! `/dev/fuse` over a socket.

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Statx, StatxAttributes, StatxFlags,
    openat2, statx,
};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, unmount};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::collections::BTreeMap;
use std::ffi::{CString, OsString};
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Reason why a disk could not be mounted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// The path exists and is not a regular file.
    #[error(
        "{} is not a regular file: name an empty file, or a path that does not exist",
        .0.display()
    )]
    NotAFile(PathBuf),
    /// Another file system is mounted over the file, such as that of a running export.
    #[error("{} is a mount point, perhaps of a running export: name another file", .0.display())]
    InUse(PathBuf),
    /// The path is still the mount point of a file system whose server has died.
    #[error("{path} is the mount of a server that died: `umount {path}` first", path = .0.display())]
    Dead(PathBuf),
    /// The file cannot be created or opened.
    #[error("{} cannot be used: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Error of the creation or of the open.
        source: io::Error,
    },
    /// The mount failed.
    #[error("{} cannot be mounted over: {source}; this needs /dev/fuse, and root or fusermount3",
        path.display())]
    Mount {
        /// Path of the file.
        path: PathBuf,
        /// Error of the mount.
        source: io::Error,
    },
}

/// Mount source that the kernel lists for a file that a server process has mounted.
const SOURCE: &str = "shadowbell";
/// Type of the file system.
const FILE_SYSTEM: &str = "fuse.shadowbell";
/// Error of a `statx` or open of a file whose FUSE server has died.
const NO_SERVER: Option<i32> = Some(Errno::NOTCONN.raw_os_error());
/// Program that mounts for users without privileges.
const HELPER: &str = "fusermount3";

/// File system of one file that is mounted over an existing file. A [`Session`](super::Session)
/// serves it, in this process or in another one. Dropping the value does not unmount the file.
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
    /// True if the file was created for the mount.
    created: bool,
}

impl Mount {
    /// Mounts over the file `path`, which is created if it does not exist. Also returns the
    /// descriptor of `/dev/fuse` from which the requests are read. When the last duplicate of this
    /// descriptor is closed, all requests for the file fail.
    ///
    /// # Errors
    /// [`MountError`]. A created file is removed before the return.
    pub fn new(path: &Path, read_only: bool) -> Result<(Self, OwnedFd), MountError> {
        Self::from_source(path, SOURCE, read_only)
    }

    /// Mounts like [`new`](Self::new), with the mount source `source`, by which
    /// [`of_source`](Self::of_source) finds the mount.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn from_source(
        path: &Path,
        source: &str,
        read_only: bool,
    ) -> Result<(Self, OwnedFd), MountError> {
        let (file, path, created) = prepare(path)?;
        let mounted = match mount(&file, source, read_only) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                mount_by_helper(&path, source, read_only)
            }
            mounted => mounted,
        };
        match mounted {
            Ok(device) => Ok((Self { path, created }, device)),
            Err(source) => {
                forget(&path, created);
                Err(MountError::Mount { path, source })
            }
        }
    }

    /// Handle of an existing mount over the file `path`, for unmounting. `created` is true if the
    /// file was [created](Self::has_created) for the mount.
    #[must_use]
    pub fn at(path: &Path, created: bool) -> Self {
        Self { path: path.to_owned(), created }
    }

    /// Finds the existing mounts with the mount source `source` in the mount namespace of this
    /// process, for unmounting. The kernel reports the paths, so no other process needs to be
    /// trusted.
    #[must_use]
    pub fn of_source(source: &str) -> Vec<Self> {
        let mounts = std::fs::read(MOUNTS).unwrap_or_default();
        let ours = fuse_files(&mounts).filter(|(_, its)| its == source.as_bytes());
        ours.map(|(path, _)| Self::at(&path, false)).collect()
    }

    /// True if the file was created for the mount.
    #[must_use]
    pub fn has_created(&self) -> bool {
        self.created
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Unmounts the file system, unless programs use it. Has no effect on file systems of other
    /// types.
    ///
    /// # Errors
    /// [`io::ErrorKind::ResourceBusy`] if programs use the file.
    pub fn unmount_unused(&self) -> io::Result<()> {
        let path = &self.path;
        if !is_fuse_file(path) {
            return Ok(());
        }
        let (_directory, at) = without_links(path)?;
        match unmount(&at, UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
            Err(Errno::PERM) => {
                let helper = Command::new(HELPER).args(["-u", "--"]).arg(path).output()?;
                // The helper fails as well if another program has unmounted the file.
                if helper.status.success() || !is_fuse_file(path) {
                    return Ok(());
                }
                let why = String::from_utf8_lossy(&helper.stderr).trim().to_owned();
                let is_busy = why.contains("busy");
                Err(if is_busy {
                    io::ErrorKind::ResourceBusy.into()
                } else {
                    io::Error::other(why)
                })
            }
            Err(errno) => Err(errno.into()),
        }
    }

    /// Unmounts the file system. Programs that have the file open can still use it.
    ///
    /// A file system of another type stays mounted, because a server process, which is not trusted,
    /// may have chosen the path.
    pub fn unmount(&self) {
        let path = &self.path;
        if !is_fuse_file(path) {
            return;
        }
        // If a symbolic link has replaced a directory of the path since the mount, the link is not
        // followed.
        let Ok((_directory, at)) = without_links(path) else {
            return tracing::warn!("cannot unmount {}: its directory has changed", path.display());
        };
        match unmount(&at, UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(Errno::BUSY) => {
                tracing::warn!(
                    "{} is in use, waiting for its users; a program that opens it now finds an \
                     empty file",
                    path.display()
                );
                let _ = unmount(&at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
            }
            Err(errno) => {
                let helper = Command::new(HELPER).args(["-u", "-z", "--"]).arg(path).output();
                if !helper.is_ok_and(|helper| helper.status.success()) {
                    tracing::warn!("cannot unmount {}: {errno}", path.display());
                }
            }
        }
    }

    /// Removes the file if it was created for the mount and is still empty.
    pub fn remove_file(&self) {
        forget(&self.path, self.created);
    }
}

/// Mounts over an open file by `mount(2)`. No path is resolved again.
fn mount(file: &OwnedFd, source: &str, read_only: bool) -> io::Result<OwnedFd> {
    let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    let options = format!(
        "fd={},rootmode=100600,user_id={},group_id={},default_permissions",
        device.as_raw_fd(),
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    let options = CString::new(options)?;
    let mut flags = MountFlags::NODEV | MountFlags::NOSUID;
    flags.set(MountFlags::RDONLY, read_only);
    rustix::mount::mount(source, by_descriptor(file), FILE_SYSTEM, flags, options.as_c_str())?;
    Ok(device)
}

/// Path of an open file through its descriptor. The path stays valid if the name of the file
/// changes.
fn by_descriptor(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Opens the directory of `path` without following links. Returns its descriptor, and a path of the
/// file that starts at this descriptor.
fn without_links(path: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Errno::INVAL.into());
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let parent = openat2(CWD, parent, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    let at = by_descriptor(&parent).join(name);
    Ok((parent, at))
}

/// Mounts by `fusermount3`, whose standard input is the socket for the descriptor.
fn mount_by_helper(path: &Path, source: &str, read_only: bool) -> io::Result<OwnedFd> {
    let (ours, its) = UnixStream::pair()?;
    let mode = if read_only { "ro" } else { "rw" };
    let source = source.replace('\\', "\\\\").replace(',', "\\,");
    let options = format!("{mode},nosuid,nodev,fsname={source},subtype=shadowbell");
    let helper = Command::new(HELPER)
        .args(["-o", &format!("{options},default_permissions"), "--"])
        .arg(path)
        .env("_FUSE_COMMFD", "0")
        .stdin(OwnedFd::from(its))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    let device = receive(&ours);
    let output = helper.wait_with_output()?;
    device?.ok_or_else(|| {
        let said = String::from_utf8_lossy(&output.stderr);
        io::Error::other(format!("{HELPER}: {}", said.trim()))
    })
}

/// Receives a descriptor. `None` if the other end was closed without sending one.
fn receive(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut room = [IoSliceMut::new(&mut byte)];
    rustix::io::retry_on_intr(|| {
        recvmsg(socket, &mut room, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let received = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok(received)
}

/// Opens the file to mount over, or creates it. The path is resolved once, and must not end with a
/// link. Returns the file, its absolute path, and true if this call created it.
fn prepare(path: &Path) -> Result<(OwnedFd, PathBuf, bool), MountError> {
    let failed = |source: io::Error| MountError::File { path: path.to_owned(), source };
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let create = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | flags;
    let (file, created) = match rustix::fs::open(path, OFlags::PATH | flags, Mode::empty()) {
        Err(Errno::NOENT) => {
            let file = rustix::fs::open(path, create, Mode::from(0o666));
            (file.map_err(|errno| failed(errno.into()))?, true)
        }
        Err(Errno::NOTCONN) => return Err(MountError::Dead(absolute(path))),
        file => (file.map_err(|errno| failed(errno.into()))?, false),
    };
    let checked = check(&file, path).and_then(|()| {
        // The mount needs read access to the file.
        File::open(by_descriptor(&file)).map_err(failed)?;
        by_descriptor(&file).read_link().map_err(failed)
    });
    match checked {
        Ok(path) => Ok((file, path, created)),
        Err(error) => {
            forget(path, created);
            Err(error)
        }
    }
}

/// Checks that a file can be mounted over.
fn check(file: &OwnedFd, path: &Path) -> Result<(), MountError> {
    // The server of a mounted file may be dead or hung, so the check sends it no request.
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let about = statx(file, "", flags, StatxFlags::TYPE);
    let is_file = |about: &Statx| FileType::from_raw_mode(about.stx_mode.into()).is_file();
    match about {
        Err(Errno::NOTCONN) => Err(MountError::Dead(absolute(path))),
        Err(errno) => Err(MountError::File { path: path.to_owned(), source: errno.into() }),
        Ok(about) if !is_file(&about) => Err(MountError::NotAFile(path.to_owned())),
        Ok(about) if about.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) => {
            // The kernel may have cached the attributes of the file of a dead server, so only an
            // open shows whether the server is alive.
            let is_dead = |error: io::Error| error.raw_os_error() == NO_SERVER;
            Err(match File::open(by_descriptor(file)).is_err_and(is_dead) {
                true => MountError::Dead(absolute(path)),
                false => MountError::InUse(path.to_owned()),
            })
        }
        Ok(_) => Ok(()),
    }
}

/// Absolute path of a file that cannot be opened. Symbolic links to directories are resolved.
fn absolute(path: &Path) -> PathBuf {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or_else(|| Path::new(".")).canonicalize();
    match (parent, path.file_name()) {
        (Ok(parent), Some(name)) => parent.join(name),
        _ => path.to_owned(),
    }
}

/// Kernel's list of the mounts of this process, see proc_pid_mountinfo(5). Of two mounts at one
/// path, the later covers the earlier.
const MOUNTS: &str = "/proc/self/mountinfo";

/// True if the topmost file system at `path` is a mounted file of this program.
fn is_fuse_file(path: &Path) -> bool {
    std::fs::read(MOUNTS).is_ok_and(|mounts| fuse_files(&mounts).any(|(at, _)| at == path))
}

/// Paths of the mounted files of this program that no other mount covers, and their sources.
fn fuse_files(mounts: &[u8]) -> impl Iterator<Item = (PathBuf, Vec<u8>)> + use<> {
    let mut topmost = BTreeMap::new();
    for line in mounts.split(|byte| *byte == b'\n') {
        let mut fields = line.split(|byte| *byte == b' ');
        let Some(path) = fields.nth(4) else { continue };
        let mut after = fields.skip_while(|field| *field != b"-").skip(1);
        let (kind, source) = (after.next(), after.next().unwrap_or_default());
        let source = (kind == Some(FILE_SYSTEM.as_bytes())).then(|| unescape(source));
        topmost.insert(PathBuf::from(OsString::from_vec(unescape(path))), source);
    }
    topmost.into_iter().filter_map(|(path, source)| Some((path, source?)))
}

/// Decodes a field of mountinfo, in which the kernel writes some bytes as a backslash and three
/// octal digits.
fn unescape(field: &[u8]) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), field);
    while let Some((first, after)) = rest.split_first() {
        let digits = after.first_chunk::<3>().filter(|_| *first == b'\\');
        let digits = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok());
        rest = if byte.is_some() { after.get(3..).unwrap_or_default() } else { after };
        bytes.push(byte.unwrap_or(*first));
    }
    bytes
}

/// Removes the file if it was created for the mount and is still empty.
fn forget(path: &Path, created: bool) {
    if created && std::fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() == 0) {
        let _ = std::fs::remove_file(path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_testing::programs::skipped;

    #[test]
    fn only_the_topmost_mount_counts() {
        let mounts = b"36 25 0:30 / /run rw - tmpfs tmpfs rw\n\
            37 36 0:40 / /run/a\\040disk rw,nosuid shared:5 - fuse.shadowbell a\\043b rw\n\
            38 36 0:41 / /run/b rw - fuse.shadowbell shadowbell rw\n\
            39 36 0:42 / /run/b rw - ext4 /dev/sda1 rw\n";
        let all: Vec<_> = fuse_files(mounts).collect();
        assert_eq!(all, [(PathBuf::from("/run/a disk"), b"a#b".to_vec())]);
    }

    /// The owner of a directory replaces the file by a link, after the check and before the mount.
    #[test]
    fn a_link_that_is_swapped_after_the_check_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let [path, secret] = ["disk", "secret"].map(|name| directory.path().join(name));
        std::fs::write(&secret, "secret").unwrap();
        let (file, _, created) = prepare(&path).unwrap();
        assert!(created);
        std::fs::rename(&path, directory.path().join("moved")).unwrap();
        std::os::unix::fs::symlink(&secret, &path).unwrap();
        if let Err(error) = mount(&file, "test,swapped", false) {
            return skipped(format_args!("no mount: {error}"));
        }
        let mounts = Mount::of_source("test,swapped");
        mounts.iter().for_each(Mount::unmount);
        let paths: Vec<_> = mounts.iter().map(Mount::path).collect();
        assert_eq!(paths, [directory.path().canonicalize().unwrap().join("moved")]);
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "secret");
        assert!(Mount::of_source("test,swapped").is_empty());
        // A link at the time of the check is refused.
        assert!(matches!(prepare(&path), Err(MountError::NotAFile(_))));
    }

    #[test]
    fn a_directory_that_is_swapped_before_the_unmount_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        std::fs::create_dir(root.join("real")).unwrap();
        std::fs::write(root.join("real/disk"), "").unwrap();
        assert!(without_links(&root.join("real/disk")).unwrap().1.exists());
        std::os::unix::fs::symlink(root.join("real"), root.join("link")).unwrap();
        assert!(without_links(&root.join("link/disk")).is_err());
    }
}
