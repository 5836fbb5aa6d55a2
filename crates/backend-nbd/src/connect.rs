//! A way to a server. It may take long: nobody who serves queues comes here.

use crate::stream::{Stream, wait};
use crate::uri::Place;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};
use shadowbell_memory::EventFd;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// A network that takes nothing for so long is given up, and so is a host that is silent.
const SILENCE: Duration = Duration::from_secs(20);
const PROBE: Duration = Duration::from_secs(5);

/// Connects until `until`, or until `stop` is readable.
///
/// # Errors
/// The system's.
pub(crate) fn connect_to(place: &Place, until: Instant, stop: &EventFd) -> io::Result<Stream> {
    match place {
        Place::Unix(path) => {
            let socket = new(AddressFamily::UNIX)?;
            finish(&socket, connect(&socket, &SocketAddrUnix::new(path)?), until, stop)?;
            Ok(Stream::new(socket))
        }
        Place::Tcp { host, port } => {
            let mut outcome = Err(io::Error::other("its name has no address"));
            for address in (&host[..], *port).to_socket_addrs()? {
                outcome = tcp(&address, until, stop);
                if outcome.is_ok() {
                    break;
                }
            }
            outcome
        }
    }
}

fn tcp(address: &SocketAddr, until: Instant, stop: &EventFd) -> io::Result<Stream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = new(family)?;
    finish(&socket, connect(&socket, address), until, stop)?;
    // A request is small, and whoever made it waits.
    sockopt::set_tcp_nodelay(&socket, true)?;
    // A host that is gone says nothing, while requests wait.
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, PROBE)?;
    sockopt::set_tcp_keepintvl(&socket, PROBE)?;
    sockopt::set_tcp_keepcnt(&socket, (SILENCE.as_secs() / PROBE.as_secs()) as u32)?;
    sockopt::set_tcp_user_timeout(&socket, SILENCE.as_millis() as u32)?;
    Ok(Stream::new(socket))
}

fn new(family: AddressFamily) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(family, SocketType::STREAM, flags, None)?)
}

fn finish(
    socket: &OwnedFd,
    begun: Result<(), Errno>,
    until: Instant,
    stop: &EventFd,
) -> io::Result<()> {
    match begun {
        Err(Errno::INPROGRESS) => {
            wait(socket.as_fd(), PollFlags::OUT, until, stop)?;
            Ok(sockopt::socket_error(socket)??)
        }
        // A UNIX socket whose queue is full: there is a server, which takes nobody now.
        outcome => Ok(outcome?),
    }
}
