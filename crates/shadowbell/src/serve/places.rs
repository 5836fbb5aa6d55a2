//! Sockets, and the files that are written: by the keeper, if there is one that does it, and
//! otherwise by this process. What is asked for and what is allowed is in [`crate::place_link`].

use crate::keeper_link::{self, Packet, send_bytes};
use crate::place_link::{
    COUNTERS, DONE, ERRNO, KEEP, Kind, LISTEN, METRICS, Made, NO_SOCKET, NoSocket, PAIR, PLACES,
    Places, REFUSED, REMOVE, REMOVE_DIRECTORY, REMOVE_UNANSWERED, TRACE, bytes_of, path_of,
};
use crate::whole_file;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use shadowbell_controller::trace::TraceFile;
use shadowbell_vfio_user::server::{BindError, Listener, ListenerParts, remove_sockets_by};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

/// How long a keeper may take to say that it does all this.
const ANSWERS: Duration = Duration::from_secs(5);

/// The way to the thread of the keeper's that does it.
struct Keeper {
    /// One question at a time.
    socket: Mutex<OwnedFd>,
    /// The same, for what has no answer.
    unanswered: OwnedFd,
}

static KEEPER: OnceLock<Keeper> = OnceLock::new();

/// From now on the keeper does it, whose thread is at the other end of this socket.
///
/// # Errors
/// It does not, in a sentence.
pub(super) fn begin(socket: OwnedFd, places: &Places) -> Result<(), String> {
    let begin = || -> io::Result<()> {
        let memory = memory(&serde_json::to_vec(places)?)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(ANSWERS))?;
        let answer = ask(&socket, PLACES, "", Some(&memory));
        set_socket_timeout(&socket, Timeout::Recv, None)?;
        answer.map(drop).map_err(Refusal::into_error)
    };
    begin().map_err(|error| format!("the keeper makes no sockets ({error})"))?;
    let unanswered = socket.try_clone().map_err(|error| error.to_string())?;
    let _ = KEEPER.set(Keeper { socket: Mutex::new(socket), unanswered });
    remove_sockets_by(|path, file| {
        let made = Made { path: bytes_of(path), file: Some(file) };
        let (Some(keeper), Ok(made)) = (KEEPER.get(), serde_json::to_string(&made)) else { return };
        match keeper.socket.try_lock() {
            Some(socket) => drop(ask(&socket, REMOVE, made, None)),
            // Guests do not wait for a question that takes long, for a file system that hangs.
            None => {
                let body = made.as_bytes();
                let _ = send_bytes(&keeper.unanswered, REMOVE_UNANSWERED, body, &[], true);
            }
        }
    });
    Ok(())
}

/// Whether the keeper does it.
pub(super) fn are_the_keeper_s() -> bool {
    KEEPER.get().is_some()
}

/// Why something was not done.
enum Refusal {
    System(io::Error),
    Socket(NoSocket),
}

impl Refusal {
    fn into_error(self) -> io::Error {
        match self {
            Self::System(error) => error,
            Self::Socket(_) => nonsense(),
        }
    }
}

fn nonsense() -> io::Error {
    io::Error::other("the keeper says something else")
}

fn ask(
    socket: &OwnedFd,
    letter: u8,
    body: impl AsRef<OsStr>,
    memory: Option<&OwnedFd>,
) -> Result<Packet, Refusal> {
    let packet = keeper_link::send(socket, letter, body, memory.map(AsFd::as_fd))
        .and_then(|()| keeper_link::receive(socket, false))
        .map_err(Refusal::System)?;
    let Some(packet) = packet else {
        return Err(Refusal::System(io::Error::other(
            "the keeper is of an earlier release, or has ended",
        )));
    };
    Err(match packet.letter {
        DONE => return Ok(packet),
        NO_SOCKET => match serde_json::from_slice(&packet.body) {
            Ok(why) => Refusal::Socket(why),
            Err(_) => Refusal::System(nonsense()),
        },
        ERRNO => Refusal::System(
            packet.text().parse().map_or_else(|_| nonsense(), io::Error::from_raw_os_error),
        ),
        REFUSED => Refusal::System(io::Error::new(io::ErrorKind::PermissionDenied, packet.text())),
        _ => Refusal::System(nonsense()),
    })
}

/// Memory with these bytes.
fn memory(bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut memory = File::from(memfd_create("shadowbell-places", MemfdFlags::CLOEXEC)?);
    memory.write_all(bytes)?;
    memory.rewind()?;
    Ok(memory.into())
}

/// Listens at `path`. A keeper has given the socket the access of its `kind` already; otherwise it
/// is to be given.
///
/// # Errors
/// The path can not be had.
pub(super) fn listen(path: &Path, kind: Kind) -> Result<Listener, BindError> {
    let Some(keeper) = KEEPER.get() else { return Listener::bind(path) };
    let system = |source| BindError::System { path: path.to_owned(), what: "created", source };
    match ask(&keeper.socket.lock(), LISTEN, kind.question(path), None) {
        Ok(packet) => {
            let made: Result<Made, _> = serde_json::from_slice(&packet.body);
            let (Ok(made), Some(socket)) = (made, packet.fd()) else {
                return Err(system(nonsense()));
            };
            let path = path_of(&made.path.0);
            Ok(Listener::from_parts(ListenerParts::new(socket, path, made.file)))
        }
        Err(Refusal::Socket(why)) => Err(why.into_error(path)),
        Err(Refusal::System(error)) => Err(system(error)),
    }
}

/// Removes the directory of a control socket, if it is empty.
pub(super) fn remove_directory(path: &Path) {
    let _ = match KEEPER.get() {
        Some(keeper) => ask(&keeper.socket.lock(), REMOVE_DIRECTORY, path, None).map(drop),
        None => std::fs::remove_dir(path).map_err(Refusal::System),
    };
}

/// Listens where the metrics were asked for.
///
/// # Errors
/// The system's.
pub(super) fn listen_tcp(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let Some(keeper) = KEEPER.get() else {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        return Ok((listener, address));
    };
    let packet = ask(&keeper.socket.lock(), METRICS, "", None).map_err(Refusal::into_error)?;
    let address = packet.text().parse().map_err(|_| nonsense())?;
    Ok((packet.fd().ok_or_else(nonsense)?.into(), address))
}

/// Writes the counters where they were asked for.
///
/// # Errors
/// The system's.
pub(super) fn write_counters(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let Some(keeper) = KEEPER.get() else { return whole_file::write(path, bytes) };
    let memory = memory(bytes)?;
    ask(&keeper.socket.lock(), COUNTERS, "", Some(&memory)).map(drop).map_err(Refusal::into_error)
}

/// The file of a new trace at `path`; with `keep` the one before is kept beside it.
///
/// # Errors
/// As [`TraceFile::create_file`].
pub(super) fn new_trace(path: &Path, keep: bool) -> io::Result<File> {
    let Some(keeper) = KEEPER.get() else {
        if keep {
            let mut kept = path.to_owned().into_os_string();
            kept.push(".before");
            // There may be none any more.
            let _ = rustix::fs::renameat(rustix::fs::CWD, path, rustix::fs::CWD, kept);
        }
        return TraceFile::create_file(path);
    };
    let keep = if keep { KEEP } else { "" };
    let packet = ask(&keeper.socket.lock(), TRACE, keep, None).map_err(Refusal::into_error)?;
    Ok(packet.fd().ok_or_else(nonsense)?.into())
}

/// The two ends of a socket for packets.
///
/// # Errors
/// The system's.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let Some(keeper) = KEEPER.get() else { return keeper_link::pair() };
    let mut packet = ask(&keeper.socket.lock(), PAIR, "", None).map_err(Refusal::into_error)?;
    packet.fds.pop().zip(packet.fds.pop()).ok_or_else(nonsense)
}
