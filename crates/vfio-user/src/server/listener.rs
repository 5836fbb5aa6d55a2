//! A socket that clients connect to, from its creation to the removal of its file.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FlockOperation, Mode, OFlags, RenameFlags, flock, openat, renameat_with};
use serde::{Deserialize, Serialize};
use shadowbell_state::{Bytes, Descriptors, FdRef};

use rustix::net::{
    AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, shutdown, socket_with,
};

use crate::descriptor::Stream;
use crate::handover::RestoreError;
use crate::{Errno, address};

/// Clients that may wait while one is attached.
const BACKLOG: i32 = 16;

/// How long to wait for another process that is creating a socket in the same directory.
const DIRECTORY_LOCK: Duration = Duration::from_secs(1);

/// Why no socket could be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The path does not fit into a socket address.
    #[error(
        "socket path {} has {len} bytes and a UNIX socket allows {}: choose a shorter one, for example in /run",
        path.display(), address::MAX_PATH
    )]
    TooLong {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        len: usize,
    },
    /// There is no directory for it.
    #[error(
        "socket path {} is in no directory: create {} first, or choose another path",
        path.display(), directory.display()
    )]
    NoDirectory {
        /// The path.
        path: PathBuf,
        /// The directory that does not exist, or is none.
        directory: PathBuf,
    },
    /// Another server listens there.
    #[error(
        "socket path {} is in use by a running server: stop that one, or choose another path",
        path.display()
    )]
    InUse {
        /// The path.
        path: PathBuf,
    },
    /// Something that is no socket is there.
    #[error(
        "socket path {} exists and is not a socket: remove it if it is not needed, or choose another path",
        path.display()
    )]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The system refused.
    #[error("socket path {} cannot be {what}: {source}", path.display())]
    System {
        /// The path.
        path: PathBuf,
        /// What was to be done with it.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// A listening UNIX socket. Its file is removed when this is dropped, unless another one has taken
/// its place meanwhile.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    path: PathBuf,
    /// Device and inode number of the file, if there is one to remove.
    file: Option<(u64, u64)>,
    /// Another process accepts clients at the same socket: dropping this must not end it.
    is_lent: bool,
}

/// What a [`Listener`] is made of, for whoever makes it in one process and has it in another.
#[derive(Debug)]
#[non_exhaustive]
pub struct ListenerParts {
    /// It listens.
    pub socket: OwnedFd,
    /// Where, from the root.
    pub path: PathBuf,
    /// Device and inode number of the file, if there is one to remove.
    pub file: Option<(u64, u64)>,
}

impl ListenerParts {
    /// Of these.
    #[must_use]
    pub fn new(socket: OwnedFd, path: PathBuf, file: Option<(u64, u64)>) -> Self {
        Self { socket, path, file }
    }
}

/// Removes the file of a socket: its path, and its device and inode number.
type Remover = Box<dyn Fn(&Path, (u64, u64)) + Send + Sync>;

static REMOVER: OnceLock<Remover> = OnceLock::new();

/// From now on the files of this process's listeners are removed by this, which has
/// [`remove_socket`] called where that is possible. The first one counts.
pub fn remove_sockets_by(remover: impl Fn(&Path, (u64, u64)) + Send + Sync + 'static) {
    let _ = REMOVER.set(Box::new(remover));
}

/// Removes the file of a socket, unless another one has taken its place.
pub fn remove_socket(path: &Path, file: (u64, u64)) {
    let there = fs::symlink_metadata(path);
    let is_it =
        |there: fs::Metadata| there.file_type().is_socket() && (there.dev(), there.ino()) == file;
    if there.is_ok_and(is_it) {
        let _ = fs::remove_file(path);
    }
}

/// A [`Listener`] on its way to another process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SavedListener {
    socket: FdRef,
    path: Bytes,
    file: Option<(u64, u64)>,
}

impl SavedListener {
    /// Where it listens.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(OsStr::from_bytes(&self.path.0))
    }
}

impl Listener {
    /// Listens at `path`, or if that is a directory, at `cntrl` in there, where SPDK's client
    /// looks.
    ///
    /// A file that a dead server has left is replaced. Whoever sees the file can connect: the
    /// socket listens before it gets its name. (Until then it is called `.NAME.PID`, and so it is
    /// in lists of sockets.)
    ///
    /// # Errors
    ///
    /// One sentence that says what is wrong with which path, and what to do about it.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self, BindError> {
        let path = address::resolve(path.as_ref());
        let system = |what| {
            let path = path.clone();
            move |errno: Errno| BindError::System { path, what, source: errno.into() }
        };
        let len = address::len(&path);
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
        let address = SocketAddrUnix::new(&path).map_err(system("used"))?;
        // Whoever finds a stale file removes it. Without the lock, two servers that start at the
        // same time could each remove the other's fresh one.
        let _lock = lock_directory(&directory);
        remove_stale(&path, &address)?;
        let socket = new_socket().map_err(system("listened on"))?;
        let in_use = |errno: Errno| match errno {
            Errno::ADDRINUSE | Errno::EXIST => BindError::InUse { path: path.clone() },
            other => system("created")(other),
        };
        // Until it listens, a connect fails.
        let hidden = hidden_name(&path);
        let hidden_address = hidden.as_ref().and_then(|name| SocketAddrUnix::new(name).ok());
        let first = match (&hidden, &hidden_address) {
            (Some(name), Some(_)) => name,
            // A long name leaves no room for a longer one: then whoever comes too early tries
            // again.
            _ => &path,
        };
        bind(&socket, hidden_address.as_ref().unwrap_or(&address)).map_err(in_use)?;
        let file = fs::symlink_metadata(first).ok().map(|file| (file.dev(), file.ino()));
        // Whatever fails from here on removes it.
        let mut listener = Self { socket, path: first.clone(), file, is_lent: false };
        listen(&listener.socket, BACKLOG).map_err(system("listened on"))?;
        if *first != path {
            rename_new(first, &path).map_err(in_use)?;
            listener.path = path.clone();
        }
        Ok(listener)
    }

    /// Takes over a socket that listens already (from a service manager, or from a predecessor).
    /// Its file is left alone.
    ///
    /// # Errors
    ///
    /// The descriptor could not be made non-blocking.
    pub fn from_fd(socket: OwnedFd, path: impl Into<PathBuf>) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self { socket, path: path.into(), file: None, is_lent: false })
    }

    /// Takes it to pieces. Its file is not removed.
    ///
    /// # Errors
    ///
    /// The system has no more descriptors.
    pub fn into_parts(mut self) -> io::Result<ListenerParts> {
        let socket = self.socket.try_clone()?;
        let path = std::path::absolute(&self.path)?;
        let file = self.file;
        self.is_lent = true;
        Ok(ListenerParts { socket, path, file })
    }

    /// Puts it together again.
    #[must_use]
    pub fn from_parts(parts: ListenerParts) -> Self {
        let ListenerParts { socket, path, file } = parts;
        Self { socket, path, file, is_lent: false }
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What a successor needs to go on with it.
    ///
    /// # Errors
    ///
    /// The system has no more descriptors.
    pub fn save(&self, fds: &mut Descriptors) -> io::Result<SavedListener> {
        // The successor may be started somewhere else.
        let path = std::path::absolute(&self.path)?;
        Ok(SavedListener {
            socket: fds.add(self.socket.try_clone()?),
            path: Bytes(path.into_os_string().into_vec()),
            file: self.file,
        })
    }

    /// The other side of [`save`](Self::save): [lent](Self::set_lent) for now.
    ///
    /// # Errors
    ///
    /// A descriptor is missing.
    pub fn restore(saved: &SavedListener, fds: &mut Descriptors) -> Result<Self, RestoreError> {
        let socket = fds.take(saved.socket)?;
        Ok(Self { socket, path: saved.path(), file: saved.file, is_lent: true })
    }

    /// Says whether another process has the socket too, and goes on if this one does not: then
    /// dropping this does nothing to the socket or to its file.
    pub fn set_lent(&mut self, is_lent: bool) {
        self.is_lent = is_lent;
    }

    /// The next client that waits, if one does.
    pub(super) fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        loop {
            match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(stream) => return Ok(Some(stream)),
                Err(Errno::AGAIN) => return Ok(None),
                // The client is gone already; another one may wait behind it.
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
        // Who still waits may have sent something already, even descriptors, and closing the socket
        // would close that.
        let _ = shutdown(&self.socket, Shutdown::Both);
        let closer = std::sync::Arc::default();
        while let Ok(Some(stream)) = self.accept() {
            drop(Stream::new(stream, std::sync::Arc::clone(&closer)));
        }
    }
}

/// A name in the directory of `path` that nobody looks for, if there is room for one in a socket's
/// address.
fn hidden_name(path: &Path) -> Option<PathBuf> {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name()?);
    name.push(format!(".{}", std::process::id()));
    let hidden = path.with_file_name(name);
    if address::len(&hidden) > address::MAX_PATH {
        return None;
    }
    // Left by a process that had our number, and died between two system calls.
    let left = fs::symlink_metadata(&hidden).is_ok_and(|file| file.file_type().is_socket());
    if left {
        let _ = fs::remove_file(&hidden);
    }
    Some(hidden)
}

/// Gives `from` the name `to`, which must not be there.
fn rename_new(from: &Path, to: &Path) -> Result<(), Errno> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        // Not every file system has it.
        Err(Errno::INVAL | Errno::NOSYS) => {
            rustix::fs::link(from, to)?;
            rustix::fs::unlink(from)
        }
        outcome => outcome,
    }
}

fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Best effort: a file system without locks must not keep anybody from listening.
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

/// Removes what a dead server has left at `path`.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), BindError> {
    let path = path.to_owned();
    let Ok(file) = fs::symlink_metadata(&path) else { return Ok(()) };
    if !file.file_type().is_socket() {
        return Err(BindError::NotASocket { path });
    }
    let probe = new_socket().map_err(|errno| BindError::System {
        path: path.clone(),
        what: "probed",
        source: errno.into(),
    })?;
    match connect(&probe, address) {
        // EAGAIN is a full backlog: somebody listens.
        Ok(()) | Err(Errno::AGAIN) => Err(BindError::InUse { path }),
        Err(Errno::CONNREFUSED) => fs::remove_file(&path).map_err(|source| BindError::System {
            path,
            what: "replaced",
            source,
        }),
        Err(Errno::NOENT) => Ok(()),
        Err(errno) => {
            Err(BindError::System { path, what: "probed for a server", source: errno.into() })
        }
    }
}
