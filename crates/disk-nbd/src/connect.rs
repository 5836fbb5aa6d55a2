//! Connects to the server. Blocking: never called from an I/O thread.

use crate::stream::{Stream, wait};
use crate::uri::{Peer, ServerAddress};
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};
use shadowbell_memory::EventFd;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time after which the kernel closes a connection whose data are not acknowledged or whose
/// keepalive probes are not answered.
const SILENCE: Duration = Duration::from_secs(20);
const PROBE: Duration = Duration::from_secs(5);

/// Function that returns a connected, non-blocking socket. Its argument waits until a descriptor is
/// readable, and fails when the connection is not wanted any more.
pub type Connector = fn(&Peer, &dyn Fn(BorrowedFd<'_>) -> io::Result<()>) -> io::Result<OwnedFd>;

static CONNECTOR: OnceLock<Connector> = OnceLock::new();

/// Makes `connector` create the connections of all disks of this process, from now on. Then a server
/// whose host name would have to be resolved cannot be reached.
pub fn connect_by(connector: Connector) {
    let _ = CONNECTOR.set(connector);
}

/// Connects to `server_address`. Gives up at the time `deadline`, or when `stop` becomes readable.
///
/// # Errors
/// The system's error.
pub(crate) fn connect_to(
    server_address: &ServerAddress,
    deadline: Instant,
    stop: &EventFd,
) -> io::Result<Stream> {
    if let Some(connector) = CONNECTOR.get() {
        let peer = server_address.peer();
        let peer = peer.ok_or_else(|| io::Error::other("its name cannot be resolved here"))?;
        let socket = connector(&peer, &|fd| wait(fd, PollFlags::IN, deadline, stop))?;
        if let Peer::Tcp(_) = peer {
            set_tcp_options(&socket)?;
        }
        return Ok(Stream::new(socket));
    }
    match server_address {
        ServerAddress::Unix(path) => {
            let socket = new(AddressFamily::UNIX)?;
            finish(&socket, connect(&socket, &SocketAddrUnix::new(path)?), deadline, stop)?;
            Ok(Stream::new(socket))
        }
        ServerAddress::Tcp { host, port } => {
            let mut outcome = Err(io::Error::other("its name has no address"));
            for address in (&host[..], *port).to_socket_addrs()? {
                outcome = tcp(&address, deadline, stop);
                if outcome.is_ok() {
                    break;
                }
            }
            outcome
        }
    }
}

fn tcp(address: &SocketAddr, deadline: Instant, stop: &EventFd) -> io::Result<Stream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = new(family)?;
    finish(&socket, connect(&socket, address), deadline, stop)?;
    set_tcp_options(&socket)?;
    Ok(Stream::new(socket))
}

fn set_tcp_options(socket: &OwnedFd) -> io::Result<()> {
    // Nagle's algorithm is disabled, because it would delay small requests.
    sockopt::set_tcp_nodelay(socket, true)?;
    // Without keepalive, an unreachable server would not be detected while only replies are
    // awaited.
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, PROBE)?;
    sockopt::set_tcp_keepintvl(socket, PROBE)?;
    sockopt::set_tcp_keepcnt(socket, (SILENCE.as_secs() / PROBE.as_secs()) as u32)?;
    Ok(sockopt::set_tcp_user_timeout(socket, SILENCE.as_millis() as u32)?)
}

fn new(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

fn finish(
    socket: &OwnedFd,
    started: Result<(), Errno>,
    deadline: Instant,
    stop: &EventFd,
) -> io::Result<()> {
    match started {
        Err(Errno::INPROGRESS) => {
            wait(socket.as_fd(), PollFlags::OUT, deadline, stop)?;
            Ok(sockopt::socket_error(socket)??)
        }
        // `EAGAIN` means that a server listens on the UNIX socket, but its backlog is full.
        outcome => Ok(outcome?),
    }
}
