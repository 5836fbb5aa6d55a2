//! Connections to NBD servers, for a server process whose sandbox forbids `connect`. Only
//! [granted](super::grants) servers are connected to.
//!
//! The server process gets a socket only when it is connected: the address of a socket that is not
//! connected could be chosen by its holder.

use super::grants::GRANTS;
use crate::protocol::{failure, open_broker as requests};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, sockopt,
};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

/// Longest time for which a connection is attempted.
const LIMIT: Duration = Duration::from_secs(60);

/// Answers a request for a connection to `server`: a TCP address, or the absolute path of a UNIX
/// socket. Blocks until it is connected, or the server process closes its end of `asker`.
pub(super) fn answer(server: &[u8], asker: &OwnedFd) -> (u8, Vec<u8>, Vec<OwnedFd>) {
    let connected = match GRANTS.lock().permits_server(server) {
        true => begin(server).and_then(|socket| finish(socket, asker)),
        false => Err(io::Error::other(
            "the sandbox permits only servers that the configuration names or `shadowbell ctl` adds",
        )),
    };
    match connected {
        Ok(socket) => (requests::OPENED, Vec::new(), vec![socket]),
        Err(error) => failure(&error, requests::ERRNO, requests::REFUSED),
    }
}

/// Begins to connect a socket.
fn begin(server: &[u8]) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let new = |family| socket_with(family, SocketType::STREAM, flags, None);
    let address = str::from_utf8(server).ok().and_then(|text| text.parse::<SocketAddr>().ok());
    let (socket, begun) = match address {
        Some(address) => {
            let is_v4 = address.is_ipv4();
            let socket = new(if is_v4 { AddressFamily::INET } else { AddressFamily::INET6 })?;
            let begun = connect(&socket, &address);
            (socket, begun)
        }
        None => {
            let socket = new(AddressFamily::UNIX)?;
            let begun = connect(&socket, &SocketAddrUnix::new(server)?);
            (socket, begun)
        }
    };
    match begun {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
        Err(errno) => Err(errno.into()),
    }
}

/// Waits until the socket is connected.
fn finish(socket: OwnedFd, asker: &OwnedFd) -> io::Result<OwnedFd> {
    let until = Instant::now() + LIMIT;
    loop {
        // A hangup of the asker is reported without being requested.
        let mut fds =
            [PollFd::new(&socket, PollFlags::OUT), PollFd::new(asker, PollFlags::empty())];
        let left = until.saturating_duration_since(Instant::now());
        match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
            Ok(0) => return Err(Errno::TIMEDOUT.into()),
            Ok(_) if fds[0].revents().is_empty() => return Err(Errno::CANCELED.into()),
            Ok(_) => {
                sockopt::socket_error(&socket)??;
                return Ok(socket);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::broker::{self, Kind, Owner};
    use super::super::grants::Permitted;
    use crate::permissions::{Permissions, bytes_of};
    use crate::protocol::{self, Packet, open_broker as requests};
    use rustix::net::{getpeername, listen};
    use shadowbell_state::Bytes;
    use shadowbell_testing::wait::until;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn permit(server: Bytes) {
        let permissions = Permissions { servers: vec![server], ..Permissions::default() };
        GRANTS.lock().permit(Permitted { permissions, config: None });
    }

    fn ask(broker: &OwnedFd, server: &Bytes) -> Packet {
        protocol::send_bytes(broker, requests::CONNECT_TO, &server.0, &[], false).unwrap();
        protocol::receive(broker, false).unwrap().unwrap()
    }

    fn text(address: impl ToString) -> Bytes {
        Bytes(address.to_string().into_bytes())
    }

    #[test]
    fn only_granted_servers_are_connected_to() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("server");
        let _unix = UnixListener::bind(&path).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let broker = broker::start(Kind::Images, Owner::new()).unwrap();
        permit(bytes_of(&directory.path().join("other")));
        for server in [bytes_of(&path), text(tcp.local_addr().unwrap())] {
            let answer = ask(&broker, &server);
            assert_eq!(answer.code, requests::REFUSED);
            assert!(answer.text().contains("permits only servers"), "{}", answer.text());
            permit(server.clone());
            let answer = ask(&broker, &server);
            assert_eq!(answer.code, requests::OPENED, "{}", answer.text());
            getpeername(&answer.fds[0]).expect("the socket is connected");
        }
        let answer = ask(&broker, &bytes_of(&directory.path().join("other")));
        assert_eq!((answer.code, &answer.text()[..]), (requests::ERRNO, "2"));
        let address = tcp.local_addr().unwrap();
        drop(tcp);
        let answer = ask(&broker, &text(address));
        assert_eq!(answer.code, requests::ERRNO, "nobody listens there any more");
        assert!(answer.fds.is_empty(), "{}", answer.text());
    }

    /// An attempt ends when the server process does not want the connection any more, and an exec
    /// of the supervisor does not wait for it.
    #[test]
    fn an_attempt_ends_with_its_asker_and_delays_no_exec() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listen(&listener, 0).unwrap();
        let address = listener.local_addr().unwrap();
        // Linux answers no further connection when the queue of the listener is full.
        let _first = TcpStream::connect(address).unwrap();
        permit(text(address));
        let broker = broker::start(Kind::Images, Owner::new()).unwrap();
        protocol::send(&broker, requests::CONNECT_TO, address.to_string(), None).unwrap();
        let unanswered = format!("0100007F:{:04X} 02 ", address.port());
        until("a connection is attempted", || {
            std::fs::read_to_string("/proc/net/tcp").unwrap().contains(&unanswered)
        });
        until("an exec can begin", || broker::pause().is_some());
        drop(broker);
        until("the attempt has ended", || {
            !std::fs::read_to_string("/proc/net/tcp").unwrap().contains(&unanswered)
        });
    }
}
