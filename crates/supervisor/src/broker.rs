//! Brokers: threads of the supervisor that open images and create sockets for a server process in
//! a sandbox.
//!
//! Each server process has one thread for paths (`path_broker`) and some for images (`open_broker`)
//! and connections to NBD servers (`connect_broker`), which end with the process, or when it closes
//! their sockets. So a hung file system delays the answer to one request of the server process, and
//! not the supervisor. A request without a [grant](super::grants) is refused, and no request adds a
//! grant.

use super::log::log_line;
use super::{connect_broker, open_broker, path_broker};
use crate::protocol::{self, open_broker as requests};
use parking_lot::{Mutex, RwLock};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{Shutdown, shutdown};
use serde::{Deserialize, Serialize};
use shadowbell_process::deferred_close;
use shadowbell_process::signals::start_thread;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Lock that a broker holds for reading from the receipt of a request to its answer. While it is
/// locked for writing ([`pause`]), no broker is answering a request, and further requests stay in
/// their sockets.
static WORK: RwLock<()> = RwLock::new(());

/// Maximum number of brokers of all server processes together.
const MAX_BROKERS: usize = 64;

/// Brokers of all server processes.
static ALL: Mutex<Vec<Arc<Broker>>> = Mutex::new(Vec::new());

/// Kind of broker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Kind {
    /// Opens images and connects to NBD servers.
    Images,
    /// Creates and removes sockets and files.
    Paths,
}

struct Broker {
    kind: Kind,
    owner: Owner,
    socket: OwnedFd,
}

/// Server process of a broker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Owner(u32);

impl Owner {
    /// Identifies the next server process. The default value stands for the process that an earlier
    /// supervisor has started.
    pub(super) fn new() -> Self {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        Self(STARTED.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// Ends the brokers of a server process that has ended. Another process may hold the other ends
    /// of their sockets.
    pub(super) fn ended(self) {
        for broker in ALL.lock().iter().filter(|broker| broker.owner == self) {
            let _ = shutdown(&broker.socket, Shutdown::Both);
        }
    }
}

/// Blocks all brokers until the result is dropped. `None` if a request is being answered.
pub(super) fn pause() -> Option<impl Sized> {
    WORK.try_write()
}

/// Returns the sockets of all brokers.
///
/// # Errors
/// The descriptor limit is reached.
pub(super) fn all() -> io::Result<Vec<(Kind, OwnedFd)>> {
    ALL.lock().iter().map(|broker| Ok((broker.kind, broker.socket.try_clone()?))).collect()
}

/// Function that starts the thread of a broker.
type Spawn = fn(Box<dyn FnOnce() + Send>) -> io::Result<()>;

fn spawn(run: Box<dyn FnOnce() + Send>) -> io::Result<()> {
    start_thread("sb-broker", 256 << 10, run)
}

/// Starts a broker, and returns the socket for the server process.
///
/// # Errors
/// The descriptor limit or the limit of threads is reached.
pub(super) fn start(kind: Kind, owner: Owner) -> io::Result<OwnedFd> {
    start_by(kind, owner, spawn)
}

fn start_by(kind: Kind, owner: Owner, spawn: Spawn) -> io::Result<OwnedFd> {
    let (ours, theirs) = protocol::pair()?;
    restore(kind, owner, ours, spawn)?;
    Ok(theirs)
}

/// Starts brokers on the sockets of an earlier supervisor.
pub(super) fn restore_all(brokers: Vec<(Kind, OwnedFd)>) {
    for (kind, socket) in brokers {
        if let Err(error) = restore(kind, Owner::default(), socket, spawn) {
            log_line(&format!(
                "error: the server process cannot open images or create sockets: no thread for \
                 the broker: {error}"
            ));
        }
    }
}

fn restore(kind: Kind, owner: Owner, socket: OwnedFd, spawn: Spawn) -> io::Result<()> {
    let broker = Arc::new(Broker { kind, owner, socket });
    ALL.lock().push(Arc::clone(&broker));
    let its = Arc::clone(&broker);
    let started = spawn(Box::new(move || {
        let is_ready = kind == Kind::Images || path_broker::become_user().is_ok();
        while is_ready && its.answers() {}
        its.ends();
    }));
    started.inspect_err(|_| broker.ends())
}

/// Answers a server process's request for another image broker.
fn connect(owner: Owner, spawn: Spawn) -> (u8, Vec<u8>, Vec<OwnedFd>) {
    let has_room = ALL.lock().len() < MAX_BROKERS;
    let room = has_room.then_some(()).ok_or_else(|| io::Error::other("too many connections"));
    match room.and_then(|()| start_by(Kind::Images, owner, spawn)) {
        Ok(socket) => (requests::OPENED, Vec::new(), vec![socket]),
        Err(error) => (requests::REFUSED, error.to_string().into(), Vec::new()),
    }
}

impl Broker {
    /// Answers the next request. Returns false after the end of the socket.
    fn answers(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let _ = poll(&mut fds, None);
        let work = WORK.read();
        let packet = match protocol::receive(&self.socket, true) {
            Ok(Some(packet)) => packet,
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            Ok(None) => return false,
        };
        let answer = match self.kind {
            Kind::Images if packet.code == requests::CONNECT => Some(connect(self.owner, spawn)),
            Kind::Images if packet.code == requests::CONNECT_TO => {
                // A server may not answer for minutes, and an exec does not wait for it. After an
                // exec the request has no answer, and the server process repeats it.
                drop(work);
                Some(connect_broker::answer(&packet.body, &self.socket))
            }
            Kind::Images => Some(open_broker::answer(&packet)),
            Kind::Paths => path_broker::answer(&packet),
        };
        deferred_close::close(packet.fds);
        let Some((code, body, fds)) = answer else { return true };
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        // The server process waits for this answer, so no earlier answer fills the socket buffer,
        // and the send does not block. A flood of descriptors of another process delays it.
        let send = || protocol::send_bytes(&self.socket, code, &body, &borrowed, true);
        let is_sent = protocol::while_in_flight(send).is_ok();
        deferred_close::close(fds);
        is_sent
    }

    fn ends(&self) {
        ALL.lock().retain(|other| !std::ptr::eq(&raw const **other, self));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If there is no thread for a broker, the request is refused, and the broker's socket is
    /// closed.
    #[test]
    fn a_broker_without_a_thread_is_refused() {
        let fails: Spawn = |_| Err(io::ErrorKind::OutOfMemory.into());
        let (code, why, fds) = connect(Owner::new(), fails);
        assert_eq!((code, fds.len()), (requests::REFUSED, 0));
        assert_eq!(why, io::Error::from(io::ErrorKind::OutOfMemory).to_string().as_bytes());
        let (ours, theirs) = protocol::pair().unwrap();
        assert!(restore(Kind::Images, Owner::new(), ours, fails).is_err());
        assert!(protocol::receive(&theirs, true).unwrap().is_none(), "the broker has ended");
    }

    /// A process to which a server process has passed its socket, or the socket of another
    /// connection, has no broker after the end of the server process.
    #[test]
    fn the_brokers_of_a_server_process_end_with_it() {
        let (owner, other) = (Owner::new(), Owner::new());
        let (passed, others) = (start(Kind::Images, owner), start(Kind::Images, other));
        let (passed, others) = (passed.unwrap(), others.unwrap());
        let connect = |socket: &OwnedFd| {
            protocol::send(socket, requests::CONNECT, "", None).unwrap();
            protocol::receive(socket, false).unwrap().unwrap().fd().unwrap()
        };
        let connected = connect(&passed);
        owner.ended();
        for socket in [passed, connected] {
            assert!(protocol::receive(&socket, false).unwrap().is_none(), "the broker has ended");
        }
        connect(&others);
    }
}
