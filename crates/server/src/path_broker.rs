//! Sockets and output files: created by the supervisor's path broker if there is one, and otherwise
//! by this process. The protocol is in [`shadowbell_supervisor::path_protocol`].

use parking_lot::Mutex;
use shadowbell_config::socket_access;
use shadowbell_controller::trace::TraceFile;
use shadowbell_supervisor::path_protocol::{
    DONE, ERRNO, KEEP, Kind, LISTEN, Made, NO_SOCKET, PAIR, REFUSED, REMOVE, REMOVE_DIRECTORY,
    REMOVE_UNANSWERED, TCP, TRACE,
};
use shadowbell_supervisor::permissions::{bytes_of, path_of};
use shadowbell_supervisor::protocol::{self, Packet, send_bytes};
use shadowbell_vfio_user::server::{
    BindError, BindOptions, Listener, ListenerParts, remove_sockets_by,
};
use std::borrow::Cow;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;

/// Connection to the path broker.
struct Broker {
    /// Socket to the broker, locked from a request to its answer.
    socket: Mutex<OwnedFd>,
    /// Duplicate of the socket, for requests without an answer.
    unanswered: OwnedFd,
}

static BROKER: OnceLock<Broker> = OnceLock::new();

/// Sets the path broker, which is at the other end of `socket`. From now on the broker creates and
/// removes all sockets and output files.
///
/// # Errors
/// The descriptor limit is reached.
pub(super) fn begin(socket: OwnedFd) -> io::Result<()> {
    let unanswered = socket.try_clone()?;
    let _ = BROKER.set(Broker { socket: Mutex::new(socket), unanswered });
    remove_sockets_by(|path, file| {
        let made = Made { path: bytes_of(path), file: Some(file) };
        let (Some(broker), Ok(made)) = (BROKER.get(), serde_json::to_string(&made)) else {
            return;
        };
        match broker.socket.try_lock() {
            Some(socket) => drop(send_request(&socket, REMOVE, made)),
            // Another request, which may wait for a hung file system, holds the lock. So the
            // removal is sent without an answer, and guests do not wait.
            None => {
                let body = made.as_bytes();
                let _ = send_bytes(&broker.unanswered, REMOVE_UNANSWERED, body, &[], true);
            }
        }
    });
    Ok(())
}

/// Returns true if the supervisor creates sockets and files.
pub(super) fn has_broker() -> bool {
    BROKER.get().is_some()
}

/// Reason for a refused request.
enum Refusal {
    System(io::Error),
    Socket(BindError),
}

impl Refusal {
    fn into_error(self) -> io::Error {
        match self {
            Self::System(error) => error,
            Self::Socket(_) => unexpected_answer(),
        }
    }
}

fn unexpected_answer() -> io::Error {
    io::Error::other("unexpected answer of the supervisor")
}

fn send_request(socket: &OwnedFd, code: u8, body: impl AsRef<OsStr>) -> Result<Packet, Refusal> {
    let packet = protocol::send(socket, code, body, None)
        .and_then(|()| protocol::receive(socket, false))
        .map_err(Refusal::System)?;
    let Some(packet) = packet else {
        return Err(Refusal::System(io::Error::other("the supervisor has ended")));
    };
    Err(match packet.code {
        DONE => return Ok(packet),
        NO_SOCKET => match serde_json::from_slice(&packet.body) {
            Ok(why) => Refusal::Socket(why),
            Err(_) => Refusal::System(unexpected_answer()),
        },
        ERRNO => Refusal::System(
            packet
                .text()
                .parse()
                .map_or_else(|_| unexpected_answer(), io::Error::from_raw_os_error),
        ),
        REFUSED => Refusal::System(io::Error::new(io::ErrorKind::PermissionDenied, packet.text())),
        _ => Refusal::System(unexpected_answer()),
    })
}

/// Creates a socket at `path`, with the access rights of `kind`.
///
/// # Errors
/// The socket cannot be created.
pub(super) fn listen(path: &Path, kind: Kind) -> Result<Listener, BindError> {
    let (what, to) = (Cow::from("created"), path);
    let system = |source| BindError::System { path: to.to_owned(), what: what.clone(), source };
    let Some(broker) = BROKER.get() else {
        let (mode, group) = match kind {
            Kind::Controller => socket_access::configured().map_err(system)?,
            Kind::Plain => (None, None),
            Kind::Private => (Some(0o600), None),
        };
        return Listener::bind_with(path, BindOptions { mode, group, replaces: None });
    };
    let wanted = serde_json::to_string(&(kind, bytes_of(path)));
    let wanted = wanted.map_err(|error| system(error.into()))?;
    match send_request(&broker.socket.lock(), LISTEN, wanted) {
        Ok(packet) => {
            let made: Result<Made, _> = serde_json::from_slice(&packet.body);
            let (Ok(made), Some(socket)) = (made, packet.fd()) else {
                return Err(system(unexpected_answer()));
            };
            let path = path_of(&made.path.0);
            Ok(Listener::from_parts(ListenerParts::new(socket, path, made.file)))
        }
        Err(Refusal::Socket(error)) => Err(error),
        Err(Refusal::System(error)) => Err(system(error)),
    }
}

/// Removes the directory of a control socket, if it is empty.
pub(super) fn remove_directory(path: &Path) {
    let _ = match BROKER.get() {
        Some(broker) => send_request(&broker.socket.lock(), REMOVE_DIRECTORY, path).map(drop),
        None => std::fs::remove_dir(path).map_err(Refusal::System),
    };
}

/// Creates a TCP socket, and returns its address.
///
/// # Errors
/// The address cannot be bound.
pub(super) fn listen_tcp(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let Some(broker) = BROKER.get() else {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        return Ok((listener, address));
    };
    let packet = send_request(&broker.socket.lock(), TCP, address.to_string())
        .map_err(Refusal::into_error)?;
    let address = packet.text().parse().map_err(|_| unexpected_answer())?;
    Ok((packet.fd().ok_or_else(unexpected_answer)?.into(), address))
}

/// Creates the file of a new trace at `path`. With `keep`, the previous file is renamed.
///
/// # Errors
/// As [`TraceFile::create_file`].
pub(super) fn new_trace(path: &Path, keep: bool) -> io::Result<File> {
    let Some(broker) = BROKER.get() else {
        if keep {
            let mut backup = path.to_owned().into_os_string();
            backup.push(".before");
            // The rename fails if there is no previous file.
            let _ = rustix::fs::renameat(rustix::fs::CWD, path, rustix::fs::CWD, backup);
        }
        return TraceFile::create_file(path);
    };
    let keep = if keep { KEEP } else { "" };
    let packet = send_request(&broker.socket.lock(), TRACE, keep).map_err(Refusal::into_error)?;
    Ok(packet.fd().ok_or_else(unexpected_answer)?.into())
}

/// Creates a pair of packet sockets.
///
/// # Errors
/// The descriptor limit is reached.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let Some(broker) = BROKER.get() else { return protocol::pair() };
    let mut packet = send_request(&broker.socket.lock(), PAIR, "").map_err(Refusal::into_error)?;
    packet.fds.pop().zip(packet.fds.pop()).ok_or_else(unexpected_answer)
}
