//! Path broker: creates and removes sockets and files for a server process in a sandbox (see
//! `serve/sandbox`).
//!
//! Each server process that requests it has a thread in the supervisor, which acts with the
//! server process's user id. Before it enters its sandbox, a server process registers what it may
//! request ([`PathPermissions`]): sockets in certain directories, one trace file, and
//! certain TCP addresses. In these directories only socket files are
//! created and removed. So the server process can neither read nor write other files through the
//! broker.

use super::log::log_line;
use super::open_broker::working;
use crate::path_protocol::{
    DONE, ERRNO, KEEP, Kind, LISTEN, MOST, Made, NO_SOCKET, NoSocket, PAIR, PLACES,
    PathPermissions, REFUSED, REMOVE, REMOVE_DIRECTORY, REMOVE_UNANSWERED, TCP, TRACE, bytes_of,
    path_of,
};
use crate::protocol::{self, Packet};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use serde::{Deserialize, Serialize};
use shadowbell_controller::trace::TraceFile;
use shadowbell_vfio_user::server::{BindError, Listener, remove_socket};
use std::ffi::OsString;
use std::fs::{DirBuilder, File, Permissions};
use std::io::{self, Read};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// All path brokers.
static ALL: Mutex<Vec<Arc<PathBroker>>> = Mutex::new(Vec::new());

struct PathBroker {
    socket: OwnedFd,
    places: Mutex<Option<PathPermissions>>,
}

/// Serialized permissions of one server process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SavedPlaces(Option<PathPermissions>);

/// Returns the sockets of all brokers, and the permissions of each.
///
/// # Errors
/// The descriptor limit is reached.
pub(super) fn all() -> io::Result<Vec<(OwnedFd, SavedPlaces)>> {
    let save = |broker: &Arc<PathBroker>| {
        let places = broker.places.lock().clone();
        Ok((broker.socket.try_clone()?, SavedPlaces(places)))
    };
    ALL.lock().iter().map(save).collect()
}

/// Starts a broker that answers a server process until the socket is closed.
pub(super) fn start(socket: OwnedFd) {
    restore(socket, SavedPlaces(None));
}

/// Starts a broker on a socket of an earlier supervisor.
pub(super) fn restore(socket: OwnedFd, saved: SavedPlaces) {
    let broker = Arc::new(PathBroker { socket, places: Mutex::new(saved.0) });
    ALL.lock().push(Arc::clone(&broker));
    let its = Arc::clone(&broker);
    let started = super::open_broker::spawn("sb-path-broker", move || {
        let is_it = its.places.lock().as_ref().is_none_or(|places| becomes(places).is_ok());
        while is_it && its.answers() {}
        its.ends();
    });
    if let Err(error) = started {
        broker.ends();
        log_line(&format!(
            "error: the server process cannot create sockets: no thread for the path broker: \
             {error}"
        ));
    }
}

/// Makes this thread, and no other, act as the server process's user. Only the effective user id
/// changes, so that this user cannot send signals to the supervisor.
fn becomes(places: &PathPermissions) -> io::Result<()> {
    let Some((uid, gid, groups)) = &places.user else { return Ok(()) };
    let (uid, gid) = (Uid::from_raw(*uid), Gid::from_raw(*gid));
    let ours = geteuid();
    if uid == ours {
        return Ok(());
    }
    let groups: Vec<_> = groups.iter().copied().map(Gid::from_raw).collect();
    set_thread_groups(&groups)?;
    set_thread_res_gid(gid, gid, gid)?;
    Ok(set_thread_res_uid(ours, uid, ours)?)
}

/// Answer to a request: descriptors and a text.
type Outcome = Result<(Vec<OwnedFd>, OsString), Failure>;

enum Failure {
    System(io::Error),
    Socket(NoSocket),
}

impl<E: Into<io::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::System(error.into())
    }
}

impl PathBroker {
    /// Answers the next request. Returns false after the end of the socket.
    fn answers(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        let _work = working();
        let packet = match protocol::receive(&self.socket, true) {
            Ok(Some(packet)) => packet,
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            Ok(None) => return false,
        };
        let is_answered = packet.letter != REMOVE_UNANSWERED;
        let outcome = self.outcome(packet);
        if !is_answered {
            return true;
        }
        let (letter, body, fds) = match outcome {
            Ok((fds, body)) => (DONE, body, fds),
            Err(Failure::Socket(why)) => (NO_SOCKET, json(&why), Vec::new()),
            Err(Failure::System(error)) => match error.raw_os_error() {
                Some(errno) => (ERRNO, errno.to_string().into(), Vec::new()),
                None => (REFUSED, error.to_string().into(), Vec::new()),
            },
        };
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        protocol::send_bytes(&self.socket, letter, body.as_bytes(), &fds, false).is_ok()
    }

    fn ends(&self) {
        ALL.lock().retain(|other| !std::ptr::eq(&raw const **other, self));
    }

    fn outcome(&self, packet: Packet) -> Outcome {
        let mut places = self.places.lock();
        let Some(places) = &*places else {
            // Registered once, before the server process enters its sandbox.
            let (PLACES, Some(memory)) = (packet.letter, packet.fd()) else {
                return Err(Errno::INVAL.into());
            };
            let named: PathPermissions = serde_json::from_slice(&contents(memory.as_fd())?)?;
            becomes(&named)?;
            *places = Some(named);
            return Ok((Vec::new(), OsString::new()));
        };
        let nothing = |()| (Vec::new(), OsString::new());
        match packet.letter {
            LISTEN => {
                let (kind, path) = Kind::parse(&packet.body).ok_or(Errno::INVAL)?;
                listen(places, kind, &path)
            }
            REMOVE | REMOVE_UNANSWERED => {
                let Made { path, file } = serde_json::from_slice(&packet.body)?;
                let path = path_of(&path.0);
                if let Some(file) = file.filter(|_| places.is_for_sockets(&path)) {
                    remove_socket(&path, file);
                }
                Ok(nothing(()))
            }
            REMOVE_DIRECTORY => {
                let path = packet.path();
                if !places.is_own_directory(&path) {
                    return Err(Errno::ACCESS.into());
                }
                Ok(nothing(std::fs::remove_dir(path)?))
            }
            TRACE => {
                let path = places.trace.as_ref().ok_or(Errno::ACCESS)?;
                let file = trace(&path_of(&path.0), packet.body == KEEP.as_bytes())?;
                Ok((vec![file.into()], OsString::new()))
            }
            TCP => {
                let address = packet.text().parse().map_err(|_| Errno::INVAL)?;
                if !places.tcp.contains(&address) {
                    return Err(Errno::ACCESS.into());
                }
                let listener = listen_tcp(address)?;
                let address = listener.local_addr()?.to_string();
                Ok((vec![listener.into()], address.into()))
            }
            PAIR => {
                let (one, other) = protocol::pair()?;
                Ok((vec![one, other], OsString::new()))
            }
            _ => Err(Errno::INVAL.into()),
        }
    }
}

impl PathPermissions {
    /// Returns true if sockets may be created and removed in this path's directory.
    fn is_for_sockets(&self, path: &Path) -> bool {
        let Some(Ok(directory)) = path.parent().map(directory) else { return false };
        let mut directories = self.directories.iter();
        directories.any(|allowed| directory.starts_with(path_of(&allowed.0)))
            || self.is_own_directory(&directory)
    }

    /// Returns true if the path is a server's directory for its control socket.
    fn is_own_directory(&self, path: &Path) -> bool {
        let control = self.control.as_ref().map(|control| path_of(&control.0));
        let (Some(parent), Some(Component::Normal(_))) =
            (path.parent(), path.components().next_back())
        else {
            return false;
        };
        control.is_some_and(|control| parent.canonicalize().is_ok_and(|parent| parent == control))
    }
}

/// Resolves symbolic links of a directory's path.
fn directory(path: &Path) -> io::Result<PathBuf> {
    if path.as_os_str().is_empty() { Path::new(".").canonicalize() } else { path.canonicalize() }
}

fn listen(places: &PathPermissions, kind: Kind, path: &Path) -> Outcome {
    let system =
        |what| move |source: io::Error| BindError::System { path: path.to_owned(), what, source };
    let no = |error: BindError| Failure::Socket(NoSocket::of(&error));
    if kind == Kind::Private
        && let Some(own) = path.parent()
        && places.is_own_directory(own)
    {
        match DirBuilder::new().mode(0o700).create(own) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(no(system("created")(error)));
            }
            _ => {}
        }
    }
    let at = if path.is_dir() { path.join("cntrl") } else { path.to_owned() };
    // If the directory does not exist, `bind` reports that.
    if at.parent().is_some_and(|parent| directory(parent).is_ok()) && !places.is_for_sockets(&at) {
        let text = format!("the sandbox permits no socket at {}", path.display());
        return Err(io::Error::other(text).into());
    }
    let listener = Listener::bind(&at).map_err(no)?;
    let (given, what) = match kind {
        Kind::Plain => (Ok(()), ""),
        Kind::Controller => {
            (places.access().give_to(listener.path()), "given its mode or its group")
        }
        Kind::Private => {
            let mode = Permissions::from_mode(0o600);
            (std::fs::set_permissions(listener.path(), mode), "made private")
        }
    };
    given.map_err(|error| no(system(what)(error)))?;
    let parts = listener.into_parts()?;
    let made = Made { path: bytes_of(&parts.path), file: parts.file };
    Ok((vec![parts.socket], json(&made)))
}

fn listen_tcp(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn trace(path: &Path, keep: bool) -> io::Result<File> {
    if keep {
        let mut kept = path.as_os_str().to_owned();
        kept.push(".before");
        // The file may not exist.
        let _ = std::fs::rename(path, kept);
    }
    TraceFile::create_file(path)
}

/// Reads a memfd of a server process. Concurrent changes only affect that process's own request.
fn contents(memory: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    if rustix::fs::fcntl_get_seals(memory).is_err() {
        return Err(Errno::INVAL.into());
    }
    let mut bytes = Vec::new();
    File::from(memory.try_clone_to_owned()?).take(MOST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn json(what: &impl Serialize) -> OsString {
    // Numbers and strings only: serialization cannot fail.
    serde_json::to_string(what).unwrap_or_default().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};
    use std::io::{Seek, Write};
    use std::os::unix::net::{UnixListener, UnixStream};

    struct Asks(OwnedFd);

    impl Asks {
        fn ask(&self, letter: u8, body: impl Into<OsString>, memory: Option<&str>) -> Packet {
            let memory = memory.map(|text| {
                let fd = memfd_create("asks", MemfdFlags::CLOEXEC).unwrap();
                let mut file = File::from(fd);
                file.write_all(text.as_bytes()).unwrap();
                file.rewind().unwrap();
                file
            });
            let memory = memory.as_ref().map(AsFd::as_fd);
            protocol::send(&self.0, letter, body.into(), memory).unwrap();
            protocol::receive(&self.0, false).unwrap().unwrap()
        }

        fn listen(&self, kind: Kind, path: &Path) -> Packet {
            self.ask(LISTEN, kind.question(path), None)
        }
    }

    /// A compromised server process sends requests outside of its registered permissions.
    #[test]
    fn requests_outside_of_the_permissions_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        let at = |name: &str| root.join(name);
        for name in ["sockets", "run", "elsewhere", "elsewhere/empty"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::os::unix::fs::symlink(at("elsewhere"), at("sockets/link")).unwrap();
        std::fs::write(at("sockets/file"), "a disk").unwrap();
        let (ours, theirs) = protocol::pair().unwrap();
        start(theirs);
        let worker = Asks(ours);
        // Requests before the registration are refused.
        let path = at("sockets/a");
        assert_eq!(worker.listen(Kind::Plain, &path).letter, ERRNO);
        let places = PathPermissions {
            directories: vec![bytes_of(&at("sockets"))],
            control: Some(bytes_of(&at("run"))),
            mode: Some(0o640),
            ..PathPermissions::default()
        };
        let places = serde_json::to_string(&places).unwrap();
        assert_eq!(worker.ask(PLACES, "", Some(&places)).letter, DONE);
        // A second registration is refused.
        assert_eq!(worker.ask(PLACES, "", Some(&places)).letter, ERRNO);
        for refused in ["elsewhere/a", "sockets/link/a", "sockets/../elsewhere/a", "run/a"] {
            let answer = worker.listen(Kind::Private, &at(refused));
            assert_eq!(answer.letter, REFUSED, "{refused}: {}", answer.text());
        }
        let answer = worker.listen(Kind::Plain, &at("sockets/file"));
        assert_eq!(answer.letter, NO_SOCKET, "{}", answer.text());
        let answer = worker.listen(Kind::Controller, &path);
        let made: Made = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((answer.letter, path_of(&made.path.0)), (DONE, path.clone()));
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o640);
        drop(UnixStream::connect(&path).unwrap());
        assert_eq!(worker.listen(Kind::Private, &at("run/vm/control.sock")).letter, DONE);
        assert_eq!((mode(&at("run/vm")), mode(&at("run/vm/control.sock"))), (0o700, 0o600));
        // Regular files, and sockets outside of the directories, are not removed.
        let other = UnixListener::bind(at("elsewhere/b")).unwrap();
        for (name, goes) in [("sockets/file", false), ("elsewhere/b", false), ("sockets/a", true)] {
            use std::os::unix::fs::MetadataExt;
            let about = std::fs::metadata(at(name)).unwrap();
            let made = Made { path: bytes_of(&at(name)), file: Some((about.dev(), about.ino())) };
            worker.ask(REMOVE, json(&made), None);
            assert_eq!(!at(name).exists(), goes, "{name}");
        }
        drop(other);
        for name in ["elsewhere/empty", "run", "run/../elsewhere/empty", "sockets/.."] {
            assert_eq!(worker.ask(REMOVE_DIRECTORY, at(name), None).letter, ERRNO, "{name}");
            assert!(at(name).exists());
        }
        assert_eq!(worker.ask(TRACE, "", None).letter, ERRNO);
        assert_eq!(worker.ask(TCP, "", None).letter, ERRNO);
        assert_eq!(worker.ask(b'?', "", None).letter, ERRNO);
    }
}
