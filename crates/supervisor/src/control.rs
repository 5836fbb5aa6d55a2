//! Control socket of the supervisor, in the abstract namespace: no file is left behind. Accepts
//! connections of root and of the supervisor's own user.

use crate::protocol::{self, Packet};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, listen, socket_with,
};
use shadowbell_process::deferred_close;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Number of socket names to try, in case that other processes hold some of them.
const ATTEMPTS: u8 = 16;
/// Maximum number of connected clients.
const MAX_CLIENTS: usize = 8;

pub(super) struct Control {
    /// Listening socket.
    pub(super) socket: OwnedFd,
    /// Connected clients, whose requests were all answered.
    pub(super) clients: Vec<OwnedFd>,
}

impl Control {
    /// Creates the socket and listens.
    ///
    /// # Errors
    /// A system call fails, or all names are in use.
    pub(super) fn listen() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let pid = rustix::process::getpid().as_raw_pid();
        let mut outcome = Ok(());
        for attempt in 0..ATTEMPTS {
            let name = protocol::name(pid, attempt);
            outcome = bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?);
            if outcome.is_ok() {
                break;
            }
        }
        outcome?;
        listen(&socket, 16)?;
        Ok(Self { socket, clients: Vec::new() })
    }

    /// Descriptors to poll for input.
    pub(super) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.clients.iter().map(AsFd::as_fd).chain([self.socket.as_fd()])
    }

    /// Returns the next request and its client. Does not block.
    pub(super) fn next(&mut self) -> Option<(Packet, OwnedFd)> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Any local process can connect. The number of connections accepted at once is limited, so
        // that they do not keep the supervisor busy.
        for _ in 0..MAX_CLIENTS {
            let Ok(client) = accept_with(&self.socket, flags) else { break };
            if self.clients.len() < MAX_CLIENTS && protocol::is_ours(&client) {
                self.clients.push(client);
            } else {
                // The client may have queued descriptors that are slow to close.
                deferred_close::close([client]);
            }
        }
        let mut at = 0;
        while let Some(client) = self.clients.get(at) {
            match protocol::receive(client, true) {
                Ok(Some(packet)) => return Some((packet, self.clients.swap_remove(at))),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => at += 1,
                Ok(None) | Err(_) => deferred_close::close([self.clients.swap_remove(at)]),
            }
        }
        None
    }
}
