//! Mount of a FUSE file, with the privileges of the calling process.
//!
//! Without the privilege to mount, the program `fusermount3` mounts and passes the descriptor of
//! `/dev/fuse` over a socket.

use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxAttributes, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, unmount};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Reason for which a disk could not be mounted.
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

/// Type of the file system.
const FILE_SYSTEM: &str = "fuse.shadowbell";
/// Error of a file whose server has died.
const NO_SERVER: Option<i32> = Some(Errno::NOTCONN.raw_os_error());
/// Program that mounts for users without privileges.
const HELPER: &str = "fusermount3";

/// File system of one file that is mounted over an existing file. A
/// [`Session`](super::Session) serves it, in this process or in another one. The end of the value
/// does not unmount it.
#[derive(Debug)]
pub struct Mount {
    path: PathBuf,
    /// True if the file was created for the mount.
    created: bool,
}

impl Mount {
    /// Mounts over the file `path`, which is created if it does not exist. Also returns the
    /// descriptor of `/dev/fuse` from which the requests are read. When all of its duplicates are
    /// closed, the file fails all requests.
    ///
    /// # Errors
    /// [`MountError`]. A created file is removed before the return.
    pub fn new(path: &Path, read_only: bool) -> Result<(Self, OwnedFd), MountError> {
        let (path, created) = prepare(path)?;
        let mounted = match mount(&path, read_only) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                mount_by_helper(&path, read_only)
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

    /// Existing mount over the file `path`, for its removal. `created` is true if the file was
    /// [created](Self::has_created) for the mount.
    #[must_use]
    pub fn at(path: &Path, created: bool) -> Self {
        Self { path: path.to_owned(), created }
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

    /// Unmounts the file system. Programs that have the file open can still use it.
    ///
    /// Has no effect on file systems of other types, because a server process may have named the
    /// path.
    pub fn unmount(&self) {
        let path = &self.path;
        if !is_fuse_file(path) {
            return;
        }
        match unmount(path, UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
            Err(Errno::BUSY) => {
                tracing::warn!(
                    "{} is in use, waiting for its users; a program that opens it now finds an \
                     empty file",
                    path.display()
                );
                let _ = unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
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

/// Mounts by `mount(2)`.
fn mount(path: &Path, read_only: bool) -> io::Result<OwnedFd> {
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
    rustix::mount::mount("shadowbell", path, FILE_SYSTEM, flags, options.as_c_str())?;
    Ok(device)
}

/// Mounts by `fusermount3`, whose standard input is the socket for the descriptor.
fn mount_by_helper(path: &Path, read_only: bool) -> io::Result<OwnedFd> {
    let (ours, its) = UnixStream::pair()?;
    let mode = if read_only { "ro" } else { "rw" };
    let options = format!("{mode},nosuid,nodev,fsname=shadowbell,subtype=shadowbell");
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

/// Returns the absolute path of the file to mount over, and true if this call created the file.
fn prepare(path: &Path) -> Result<(PathBuf, bool), MountError> {
    let failed = |source| MountError::File { path: path.to_owned(), source };
    let created = match std::fs::metadata(path) {
        Ok(about) if about.is_file() && is_mount_point(path) => {
            // The kernel may remember the attributes of a dead mount.
            let is_dead = |error: io::Error| error.raw_os_error() == NO_SERVER;
            return Err(match File::open(path).is_err_and(is_dead) {
                true => MountError::Dead(absolute(path)),
                false => MountError::InUse(path.to_owned()),
            });
        }
        Ok(about) if about.is_file() => false,
        Ok(_) => return Err(MountError::NotAFile(path.to_owned())),
        Err(error) if error.raw_os_error() == NO_SERVER => {
            return Err(MountError::Dead(absolute(path)));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            OpenOptions::new().write(true).create_new(true).open(path).map_err(failed)?;
            true
        }
        Err(error) => return Err(failed(error)),
    };
    // The mount needs read access to the file.
    let usable = File::open(path).and_then(|_| path.canonicalize());
    match usable {
        Ok(path) => Ok((path, created)),
        Err(error) => {
            forget(path, created);
            Err(failed(error))
        }
    }
}

/// Absolute path of a file that cannot be opened, without symbolic links of directories.
fn absolute(path: &Path) -> PathBuf {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or_else(|| Path::new(".")).canonicalize();
    match (parent, path.file_name()) {
        (Ok(parent), Some(name)) => parent.join(name),
        _ => path.to_owned(),
    }
}

fn is_mount_point(path: &Path) -> bool {
    statx(CWD, path, AtFlags::empty(), StatxFlags::TYPE)
        .is_ok_and(|about| about.stx_attributes.contains(StatxAttributes::MOUNT_ROOT))
}

/// True if the topmost file system at `path` is a mounted file of this program.
fn is_fuse_file(path: &Path) -> bool {
    std::fs::read("/proc/self/mountinfo").is_ok_and(|mounts| has_fuse_file(&mounts, path))
}

/// Searches `mountinfo`; see proc_pid_mountinfo(5). Later mounts cover earlier ones.
fn has_fuse_file(mounts: &[u8], path: &Path) -> bool {
    let mut escaped = Vec::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b' ' | b'\t' | b'\n' | b'\\' => escaped.extend(format!("\\{byte:03o}").into_bytes()),
            byte => escaped.push(*byte),
        }
    }
    let mut types = mounts.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ');
        let is_at_path = fields.nth(4)? == escaped;
        let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
        is_at_path.then_some(kind)
    });
    types.next_back() == Some(FILE_SYSTEM.as_bytes())
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

    #[test]
    fn only_the_topmost_mount_counts() {
        let mounts = b"36 25 0:30 / /run rw - tmpfs tmpfs rw\n\
            37 36 0:40 / /run/a\\040disk rw,nosuid shared:5 - fuse.shadowbell shadowbell rw\n\
            38 36 0:41 / /run/b rw - fuse.shadowbell shadowbell rw\n\
            39 36 0:42 / /run/b rw - ext4 /dev/sda1 rw\n";
        let has = |path: &str| has_fuse_file(mounts, Path::new(path));
        assert!(has("/run/a disk"));
        for other in ["/run", "/run/b", "/run/a", ""] {
            assert!(!has(other), "{other}");
        }
    }
}
