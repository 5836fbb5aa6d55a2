//! Listening socket of a device, and its file in the file system.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, CWD, FlockOperation, Gid, Mode, OFlags, RenameFlags, chownat, flock, openat,
    renameat_with,
};
use serde::{Deserialize, Serialize};
use shadowbell_state::{Bytes, Descriptors, FdRef};

use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, shutdown, socket_with,
};
use rustix::process::geteuid;

use crate::descriptor::Stream;
use crate::handover::RestoreError;
use crate::{Errno, address};

/// Maximum number of clients that wait in the backlog.
const BACKLOG: i32 = 16;

/// Mode bit (the sticky bit) of a socket file whose final mode and group are not set yet.
const MARK: u32 = 0o1000;

/// Maximum time to wait for another process that creates a socket in the same directory.
const DIRECTORY_LOCK: Duration = Duration::from_secs(1);

/// Remedy in an error message for a socket path whose directory does not exist. For QEMU's form
/// `unix:PATH`, the remedy is to write only PATH.
fn no_directory_hint(path: &Path, directory: &Path) -> String {
    match path.to_str().and_then(|text| text.strip_prefix("unix:")) {
        Some(path) => format!("write the path alone, `{path}`"),
        None => format!("create {} first, or choose another path", directory.display()),
    }
}

/// Directory of a socket's path.
fn directory_of(path: &Path) -> Result<PathBuf, BindError> {
    let len = address::len(path);
    let path = path.to_owned();
    if len > address::MAX_PATH {
        return Err(BindError::TooLong { path, len });
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    if !directory.is_dir() {
        return Err(BindError::NoDirectory { path, directory });
    }
    Ok(directory)
}

/// Error in creating a listening socket.
#[derive(Debug, Serialize, Deserialize, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The path exceeds the length of a socket address.
    #[error(
        "socket path {} has {len} bytes and a UNIX socket allows {}: choose a shorter one, for example in /run",
        path.display(), address::MAX_PATH
    )]
    TooLong {
        /// Path of the socket.
        path: PathBuf,
        /// Length in bytes.
        len: usize,
    },
    /// The directory of the path does not exist.
    #[error(
        "socket path {} is in no directory: {}",
        path.display(), no_directory_hint(path, directory)
    )]
    NoDirectory {
        /// Path of the socket.
        path: PathBuf,
        /// Directory in the path that does not exist, or is not a directory.
        directory: PathBuf,
    },
    /// Another server listens at the path.
    #[error(
        "socket path {} is in use by a running server: stop that one, or choose another path",
        path.display()
    )]
    InUse {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The path exists and is not a socket.
    #[error(
        "socket path {} exists and is not a socket: remove it if it is not needed, or choose another path",
        path.display()
    )]
    NotASocket {
        /// Path of the socket.
        path: PathBuf,
    },
    /// Another program's socket, which has no listener, is at the path.
    #[error(
        "socket path {} has the socket of another program: remove it if it is not needed, or choose another path",
        path.display()
    )]
    Foreign {
        /// Path of the socket.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("socket path {} cannot be {what}: {source}", path.display())]
    System {
        /// Path of the socket.
        path: PathBuf,
        /// The failed operation, as a participle.
        what: Cow<'static, str>,
        /// The system's error.
        #[serde(with = "error_number")]
        source: io::Error,
    },
}

impl BindError {
    /// True if the same path may be usable later: its directory is missing, or another server
    /// listens on it and may end.
    #[must_use]
    pub fn can_pass(&self) -> bool {
        match self {
            // False if the error is permanent: `directory` is a file, or `path` has the form
            // `unix:PATH`.
            Self::NoDirectory { path, directory } => {
                !directory.exists() && !path.to_string_lossy().starts_with("unix:")
            }
            Self::InUse { .. } => true,
            _ => false,
        }
    }
}

/// Serialization of a system error as its error number.
mod error_number {
    use serde::{Deserialize, Deserializer, Serializer};
    use std::io;

    pub(super) fn serialize<S: Serializer>(error: &io::Error, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_i32(error.raw_os_error().unwrap_or_default())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<io::Error, D::Error> {
        i32::deserialize(from).map(io::Error::from_raw_os_error)
    }
}

/// Options of [`Listener::bind_with`].
#[derive(Clone, Copy, Default)]
pub struct BindOptions<'a> {
    /// Permission bits of the socket file. `None`: set by the umask.
    pub mode: Option<u32>,
    /// Group of the socket file. `None`: that of the process.
    pub group: Option<u32>,
    /// Function that decides, by device and inode number, if a socket file without a listener is
    /// replaced. `None`: every socket file without a listener is replaced.
    pub replaces: Option<&'a dyn Fn((u64, u64)) -> bool>,
}

/// Listening UNIX socket. When it is dropped, its socket file is removed, unless another file has
/// replaced it.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode number of the socket file, if the drop has to remove it.
    file: Option<(u64, u64)>,
    /// True if another process accepts clients on the same socket. The drop must then not shut down
    /// the socket or remove its file.
    is_lent: bool,
}

/// Parts of a [`Listener`], for passing it to another process.
#[derive(Debug)]
#[non_exhaustive]
pub struct ListenerParts {
    /// Listening socket.
    pub socket: OwnedFd,
    /// Absolute path.
    pub path: PathBuf,
    /// Device and inode number of the socket file, if the listener's drop has to remove it.
    pub file: Option<(u64, u64)>,
}

impl ListenerParts {
    /// Combines the parts.
    #[must_use]
    pub fn new(socket: OwnedFd, path: PathBuf, file: Option<(u64, u64)>) -> Self {
        Self { socket, path, file }
    }
}

/// Callback that removes a socket file. Its arguments are the path, and the device and inode
/// number.
type Remover = Box<dyn Fn(&Path, (u64, u64)) + Send + Sync>;

static REMOVER: OnceLock<Remover> = OnceLock::new();

/// Sets the callback that removes socket files of this process's listeners. For a process without
/// access to the directory, the callback lets another process call [`remove_socket`]. Only the
/// first call has an effect.
pub fn remove_sockets_by(remover: impl Fn(&Path, (u64, u64)) + Send + Sync + 'static) {
    let _ = REMOVER.set(Box::new(remover));
}

/// Removes a socket file, unless another file has replaced it.
pub fn remove_socket(path: &Path, file: (u64, u64)) {
    let there = fs::symlink_metadata(path);
    let is_it =
        |there: fs::Metadata| there.file_type().is_socket() && (there.dev(), there.ino()) == file;
    if there.is_ok_and(is_it) {
        let _ = fs::remove_file(path);
    }
}

/// Serialized [`Listener`].
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SavedListener {
    socket: FdRef,
    path: Bytes,
    file: Option<(u64, u64)>,
}

impl SavedListener {
    /// Path of the socket.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(OsStr::from_bytes(&self.path.0))
    }
}

impl Listener {
    /// Listens at `path`. If it is a directory, listens at its entry `cntrl`, which SPDK's client
    /// expects.
    ///
    /// A socket file of a dead server is replaced. Clients can connect as soon as the file exists,
    /// because the socket already listens when the file gets its final name. (Before that, its name
    /// is `.NAME.PID`, which programs that list sockets, such as `ss`, show also afterwards.)
    ///
    /// # Errors
    ///
    /// [`BindError`]. Its message describes the problem with the path, and the remedy.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, BindError> {
        Self::bind_with(path, BindOptions::default())
    }

    /// Checks the path of a socket without creating it: its length and its directory.
    ///
    /// # Errors
    ///
    /// [`BindError::TooLong`], [`BindError::NoDirectory`].
    pub fn check_path(path: impl AsRef<Path>) -> Result<(), BindError> {
        directory_of(&address::resolve(path.as_ref())).map(drop)
    }

    /// Listens at `path`, as [`bind`](Self::bind) does, with these options. Mode and group are set
    /// before the file gets its final name, and never on a file that this call has not created.
    ///
    /// # Errors
    ///
    /// [`BindError`].
    pub fn bind_with(path: impl AsRef<Path>, options: BindOptions<'_>) -> Result<Self, BindError> {
        let path = address::resolve(path.as_ref());
        let failed = |what: &'static str| {
            let (path, what) = (path.clone(), what.into());
            move |source: io::Error| BindError::System { path, what, source }
        };
        let system = |what| {
            let failed = failed(what);
            move |errno: Errno| failed(errno.into())
        };
        let directory = directory_of(&path)?;
        let address = SocketAddrUnix::new(&path).map_err(system("used"))?;
        // Stale files are removed under a lock. Without it, two servers that start at the same time
        // could each remove the other's new file.
        let _lock = lock_directory(&directory);
        remove_stale(&path, &address, options.replaces)?;
        let socket = new_socket().map_err(system("listened on"))?;
        let has_access = options.mode.is_some() || options.group.is_some();
        if has_access {
            // The file is created with the mode of the socket. If the options have a mode, the file
            // first permits no access, so no client connects before it has that mode.
            let first = if options.mode.is_some() { MARK } else { MARK | 0o777 };
            chmod(&socket, first).map_err(failed("created"))?;
        }
        let in_use = |errno: Errno| match errno {
            Errno::ADDRINUSE | Errno::EXIST => BindError::InUse { path: path.clone() },
            other => system("created")(other),
        };
        // The socket gets a hidden name until it listens, because a connect before that would fail.
        let hidden = hidden_name(&path);
        let hidden_address = hidden.as_ref().and_then(|name| SocketAddrUnix::new(name).ok());
        let first = match (&hidden, &hidden_address) {
            (Some(name), Some(_)) => name,
            // If the hidden name would be too long, the final name is used immediately. A client
            // that connects too early then has to try again.
            _ => &path,
        };
        bind(&socket, hidden_address.as_ref().unwrap_or(&address)).map_err(in_use)?;
        let node = new_node(first).inspect_err(|_| remove_bound(first));
        let (node, about) = node.map_err(failed("created"))?;
        let file = (about.dev(), about.ino());
        // If a later step fails, the listener is dropped, which removes the file.
        let mut listener = Self { socket, path: first.clone(), file: Some(file), is_lent: false };
        if has_access {
            set_access(&node, &about, options).map_err(failed("given its mode or its group"))?;
        }
        listen(&listener.socket, BACKLOG).map_err(system("listened on"))?;
        if *first != path {
            rename_new(first, &path).map_err(in_use)?;
            listener.path = path.clone();
        }
        Ok(listener)
    }

    /// Wraps a listening socket that a service manager or the previous server process has created.
    /// When the listener is dropped, its file stays.
    ///
    /// # Errors
    ///
    /// The descriptor cannot be made non-blocking.
    pub fn from_fd(socket: OwnedFd, path: impl Into<PathBuf>) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self { socket, path: path.into(), file: None, is_lent: false })
    }

    /// Splits the listener into parts. The file of the socket stays.
    ///
    /// # Errors
    ///
    /// The process has too many open files.
    pub fn into_parts(mut self) -> io::Result<ListenerParts> {
        let socket = self.socket.try_clone()?;
        let path = std::path::absolute(&self.path)?;
        let file = self.file;
        self.is_lent = true;
        Ok(ListenerParts { socket, path, file })
    }

    /// Creates a listener from its parts.
    #[must_use]
    pub fn from_parts(parts: ListenerParts) -> Self {
        let ListenerParts { socket, path, file } = parts;
        Self { socket, path, file, is_lent: false }
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Serializes the listener for the next server process.
    ///
    /// # Errors
    ///
    /// The process has too many open files.
    pub fn save(&self, fds: &mut Descriptors) -> io::Result<SavedListener> {
        // The path is absolute, because the next process may have another working directory.
        let path = std::path::absolute(&self.path)?;
        Ok(SavedListener {
            socket: fds.add(self.socket.try_clone()?),
            path: Bytes(path.into_os_string().into_vec()),
            file: self.file,
        })
    }

    /// Restores a listener from the state of [`save`](Self::save). The previous process still has
    /// the socket, so the listener starts as after [`set_lent(true)`](Self::set_lent).
    ///
    /// # Errors
    ///
    /// A descriptor is missing.
    pub fn restore(saved: &SavedListener, fds: &mut Descriptors) -> Result<Self, RestoreError> {
        let socket = fds.take(saved.socket)?;
        Ok(Self { socket, path: saved.path(), file: saved.file, is_lent: true })
    }

    /// Restores the listener at `path` without the state of [`save`](Self::save), from the socket
    /// of the previous process.
    #[must_use]
    pub fn from_socket(socket: OwnedFd, path: &Path) -> Self {
        let path = address::resolve(path);
        let file = fs::symlink_metadata(&path).ok().map(|file| (file.dev(), file.ino()));
        Self { socket, path, file, is_lent: true }
    }

    /// Sets whether another process also has the socket, and accepts clients on it. If so, dropping
    /// the listener affects neither the socket nor its file.
    pub fn set_lent(&mut self, is_lent: bool) {
        self.is_lent = is_lent;
    }

    /// Accepts the next waiting client, if any.
    pub(super) fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        loop {
            match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => return Ok(Some(stream)),
                Err(Errno::AGAIN) => return Ok(None),
                // This client has disconnected already. Another one may wait behind it.
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(errno) => return Err(errno),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.is_lent {
            return;
        }
        let Some(ours) = self.file else { return };
        match REMOVER.get() {
            Some(remove) => remove(&self.path, ours),
            None => remove_socket(&self.path, ours),
        }
        // Waiting clients may have sent data with descriptors. When the listening socket is closed,
        // this thread would close them. So a closer gets the waiting clients' sockets first.
        let _ = shutdown(&self.socket, Shutdown::Both);
        let closer = std::sync::Arc::default();
        while let Ok(Some(stream)) = self.accept() {
            drop(Stream::new(stream, std::sync::Arc::clone(&closer)));
        }
    }
}

/// Hidden name in the directory of `path`; `None` if it does not fit into a socket address.
fn hidden_name(path: &Path) -> Option<PathBuf> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name()?);
    name.push(format!(".{}", std::process::id()));
    let hidden = path.with_file_name(name);
    if address::len(&hidden) > address::MAX_PATH {
        return None;
    }
    // A crashed process with the same process identifier may have left this file.
    let left = fs::symlink_metadata(&hidden).is_ok_and(|file| file.file_type().is_socket());
    if left {
        let _ = fs::remove_file(&hidden);
    }
    Some(hidden)
}

/// Renames `from` to `to`. No file `to` may exist.
fn rename_new(from: &Path, to: &Path) -> Result<(), Errno> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Some file systems do not support RENAME_NOREPLACE.
        Err(Errno::INVAL | Errno::NOSYS) => {
            rustix::fs::link(from, to)?;
            rustix::fs::unlink(from)
        }
        outcome => outcome,
    }
}

/// Opens the file of a socket that was just bound, without access to its content.
fn new_node(path: &Path) -> io::Result<(File, Metadata)> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let node = File::from(openat(CWD, path, flags, Mode::empty())?);
    let about = node.metadata()?;
    match about.file_type().is_socket() {
        true => Ok((node, about)),
        false => Err(Errno::EXIST.into()),
    }
}

/// Removes a socket file that was bound and cannot be opened, for example for lack of descriptors.
/// If another user of the directory has put another file in its place, that other file stays.
fn remove_bound(path: &Path) {
    if let Ok(about) = fs::symlink_metadata(path)
        && about.uid() == geteuid().as_raw()
    {
        remove_socket(path, (about.dev(), about.ino()));
    }
}

/// Sets mode and group of a new socket file by its descriptor. Other users of the directory may
/// have put another file in its place: that other file has no [`MARK`].
fn set_access(node: &File, about: &Metadata, options: BindOptions<'_>) -> io::Result<()> {
    if about.mode() & MARK == 0 {
        return Err(Errno::EXIST.into());
    }
    if let Some(group) = options.group {
        let group = Some(Gid::from_raw(group));
        chownat(CWD, own_path(node), None, group, AtFlags::empty())?;
    }
    chmod(node, options.mode.unwrap_or(about.mode() & 0o777))
}

/// Sets the mode of an open file, by the system call `chmod`, which the sandbox of a server
/// without a supervisor permits.
fn chmod(fd: impl AsFd, mode: u32) -> io::Result<()> {
    fs::set_permissions(own_path(fd), fs::Permissions::from_mode(mode))
}

/// Path of an open file in `/proc`. It leads to this file even if another one has replaced its
/// name.
fn own_path(fd: impl AsFd) -> String {
    format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd())
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Locks a directory. If the file system does not support locks, the server starts without the
/// lock.
fn lock_directory(directory: &Path) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = openat(CWD, directory, flags, Mode::empty()).ok()?;
    let until = Instant::now() + DIRECTORY_LOCK;
    loop {
        match flock(&fd, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(fd),
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(_) => return None,
        }
    }
}

/// Removes the socket file of a dead server at `path`, if `replaces` permits it.
fn remove_stale(
    path: &Path,
    address: &SocketAddrUnix,
    replaces: Option<&dyn Fn((u64, u64)) -> bool>,
) -> Result<(), BindError> {
    let path = path.to_owned();
    let Ok(file) = fs::symlink_metadata(&path) else { return Ok(()) };
    if !file.file_type().is_socket() {
        return Err(BindError::NotASocket { path });
    }
    let probe = new_socket().map_err(|errno| BindError::System {
        path: path.clone(),
        what: "probed".into(),
        source: errno.into(),
    })?;
    match connect(&probe, address) {
        // EAGAIN means that the backlog is full, so a server listens.
        Ok(()) | Err(Errno::AGAIN) => Err(BindError::InUse { path }),
        Err(Errno::CONNREFUSED) if replaces.is_some_and(|may| !may((file.dev(), file.ino()))) => {
            Err(BindError::Foreign { path })
        }
        Err(Errno::CONNREFUSED) => fs::remove_file(&path).map_err(|source| BindError::System {
            path,
            what: "replaced".into(),
            source,
        }),
        Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(BindError::System {
            path,
            what: "probed for a server".into(),
            source: errno.into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn errors_reach_another_process() {
        let path = || PathBuf::from("/x");
        let source = io::Error::from_raw_os_error(13);
        for error in [
            BindError::TooLong { path: path(), len: 200 },
            BindError::NoDirectory { path: path(), directory: "/no".into() },
            BindError::InUse { path: path() },
            BindError::NotASocket { path: path() },
            BindError::Foreign { path: path() },
            BindError::System { path: path(), what: "probed".into(), source },
        ] {
            let text = serde_json::to_string(&error).unwrap();
            let read: BindError = serde_json::from_str(&text).unwrap();
            assert_eq!(read.to_string(), error.to_string());
        }
    }

    #[test]
    fn mode_and_group_are_set_only_on_the_new_socket() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let group = fs::metadata(directory.path()).unwrap().gid();
        let options = BindOptions { mode: Some(0o666), group: Some(group), replaces: None };
        let listener = Listener::bind_with(at("vm.sock"), options).unwrap();
        assert_eq!(mode(&at("vm.sock")), 0o666);
        drop(listener);
        let options = BindOptions { group: Some(group), ..BindOptions::default() };
        let _listener = Listener::bind_with(at("vm.sock"), options).unwrap();
        let usual = UnixListener::bind(at("usual")).unwrap();
        assert_eq!(mode(&at("vm.sock")), mode(&at("usual")));
        drop(usual);
        // The test imitates another user of the directory, who replaces the new socket.
        fs::write(at("secret"), "").unwrap();
        fs::set_permissions(at("secret"), fs::Permissions::from_mode(0o600)).unwrap();
        symlink(at("secret"), at("link")).unwrap();
        for name in ["link", "secret"] {
            let why = new_node(&at(name)).unwrap_err();
            assert_eq!(why.kind(), io::ErrorKind::AlreadyExists, "{name}");
        }
        let (node, about) = new_node(&at("usual")).unwrap();
        let before = mode(&at("usual"));
        let options = BindOptions { mode: Some(0o666), ..BindOptions::default() };
        let why = set_access(&node, &about, options).unwrap_err();
        assert_eq!(why.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!((mode(&at("secret")), mode(&at("usual"))), (0o600, before));
    }

    #[test]
    fn a_stale_socket_of_another_program_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm.sock");
        drop(UnixListener::bind(&path).unwrap());
        let about = fs::symlink_metadata(&path).unwrap();
        let file = (about.dev(), about.ino());
        for replaces in [false, true] {
            let decides = |it| {
                assert_eq!(it, file);
                replaces
            };
            let options = BindOptions { replaces: Some(&decides), ..BindOptions::default() };
            let outcome = Listener::bind_with(&path, options);
            match replaces {
                false => assert!(matches!(outcome, Err(BindError::Foreign { .. }))),
                true => assert!(outcome.is_ok()),
            }
        }
    }
}
