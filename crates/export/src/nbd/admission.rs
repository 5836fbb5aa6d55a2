//! Client admission: connection limit and eviction.
//!
//! Clients in the handshake have a limit of their own, because each occupies a thread for up to
//! half a minute. Beyond the limit, a further client is accepted, and the oldest new client of the
//! peer with most new clients is evicted. A single peer (a user of this machine, or an IP address)
//! can have at most three quarters of the admitted clients.

use parking_lot::Mutex;
use rustix::net::{Shutdown, SocketAddrAny, shutdown};
use shadowbell_block::QueueThread;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// Largest number of clients in the handshake.
const MAX_NEW: usize = 64;

/// Peer of a socket, as far as the system reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Peer {
    User(u32),
    Address(IpAddr),
    Unknown,
}

impl Peer {
    /// Peer of a socket that was accepted from this address.
    pub(super) fn of(socket: BorrowedFd<'_>, address: Option<SocketAddrAny>) -> Self {
        if let Some(address) = address.and_then(|address| SocketAddr::try_from(address).ok()) {
            return Self::Address(address.ip());
        }
        match rustix::net::sockopt::socket_peercred(socket) {
            Ok(credentials) => Self::User(credentials.uid.as_raw()),
            Err(_) => Self::Unknown,
        }
    }
}

/// Admitted clients, which have completed the handshake.
pub(super) struct Admitted {
    max_clients: usize,
    by_peer: Mutex<HashMap<Peer, usize>>,
}

/// Admission of a client. Dropping the value ends the admission.
pub(super) struct Admission {
    admitted: Arc<Admitted>,
    peer: Peer,
}

impl Admitted {
    pub(super) fn new(max_clients: usize) -> Arc<Self> {
        Arc::new(Self { max_clients: max_clients.max(1), by_peer: Mutex::default() })
    }

    /// Largest number of clients of one peer.
    fn max_of_one_peer(&self) -> usize {
        self.max_clients - self.max_clients / 4
    }

    /// Admits a client of `peer`, if the limits permit it.
    pub(super) fn take(self: &Arc<Self>, peer: Peer) -> Option<Admission> {
        let mut by_peer = self.by_peer.lock();
        if by_peer.values().sum::<usize>() >= self.max_clients {
            return None;
        }
        let count = by_peer.entry(peer).or_default();
        if *count >= self.max_of_one_peer() {
            return None;
        }
        *count += 1;
        Some(Admission { admitted: Arc::clone(self), peer })
    }

    /// True if a client of `peer` would not be admitted.
    pub(super) fn is_full(&self, peer: Peer) -> bool {
        let by_peer = self.by_peer.lock();
        by_peer.values().sum::<usize>() >= self.max_clients
            || by_peer.get(&peer).is_some_and(|count| *count >= self.max_of_one_peer())
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        let mut by_peer = self.admitted.by_peer.lock();
        if let Some(count) = by_peer.get_mut(&self.peer) {
            *count -= 1;
            if *count == 0 {
                by_peer.remove(&self.peer);
            }
        }
    }
}

/// Client in the handshake. The value has a duplicate of the client's socket, by which the client
/// can be evicted. When the handshake has ended, the drop of the value closes the duplicate.
pub(super) struct NewClient {
    pub(super) peer: Peer,
    socket: Arc<Mutex<Option<OwnedFd>>>,
}

impl NewClient {
    pub(super) fn new(peer: Peer, socket: OwnedFd) -> Self {
        Self { peer, socket: Arc::new(Mutex::new(Some(socket))) }
    }
}

impl Drop for NewClient {
    fn drop(&mut self) {
        // The duplicate must be closed, because the connection closes only with its last
        // descriptor.
        self.socket.lock().take();
    }
}

/// Client in the list of the accepting thread.
struct Client {
    thread: QueueThread,
    peer: Peer,
    socket: Arc<Mutex<Option<OwnedFd>>>,
}

/// All clients, in the order of connection.
#[derive(Default)]
pub(super) struct Clients(Vec<Client>);

impl Clients {
    /// Calls `start` to start the thread of a new client.
    ///
    /// # Errors
    ///
    /// The error of `start`, if the thread cannot be created.
    pub(super) fn add(
        &mut self,
        new: NewClient,
        start: impl FnOnce(NewClient) -> io::Result<QueueThread>,
    ) -> io::Result<()> {
        let (peer, socket) = (new.peer, Arc::clone(&new.socket));
        self.0.push(Client { thread: start(new)?, peer, socket });
        Ok(())
    }

    /// Evicts a client in the handshake if there are too many. Selects the peer with the most
    /// clients in the handshake, and evicts its oldest one.
    pub(super) fn make_room(&mut self) {
        self.0.retain(|client| !client.thread.is_finished());
        let mut new: HashMap<Peer, usize> = HashMap::new();
        for client in self.0.iter().filter(|client| client.is_new()) {
            *new.entry(client.peer).or_default() += 1;
        }
        if new.values().sum::<usize>() < MAX_NEW {
            return;
        }
        let max_clients = new.into_iter().max_by_key(|(_, count)| *count).map(|(peer, _)| peer);
        let of_most = |client: &&Client| client.is_new() && Some(client.peer) == max_clients;
        if let Some(client) = self.0.iter().find(of_most) {
            let socket = client.socket.lock().take();
            let _ = socket.map(|socket| shutdown(socket.as_fd(), Shutdown::Both));
        }
    }

    /// Waits for the end of all clients' threads.
    pub(super) fn join(self) {
        for client in self.0 {
            client.thread.join();
        }
    }
}

impl Client {
    fn is_new(&self) -> bool {
        self.socket.lock().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_peer_cannot_take_all_client_slots() {
        let agreed = Admitted::new(8);
        let mut slots: Vec<_> =
            std::iter::from_fn(|| agreed.take(Peer::User(1))).take(100).collect();
        assert_eq!(slots.len(), 6);
        assert!(agreed.is_full(Peer::User(1)) && !agreed.is_full(Peer::User(2)));
        let others: Vec<_> = std::iter::from_fn(|| agreed.take(Peer::User(2))).take(100).collect();
        assert_eq!(others.len(), 2);
        assert!(agreed.is_full(Peer::User(3)));
        slots.pop();
        assert_eq!(agreed.by_peer.lock().values().sum::<usize>(), 7);
        assert!(agreed.take(Peer::User(1)).is_some());
        drop((slots, others));
        assert!(agreed.by_peer.lock().is_empty());
        assert!(Admitted::new(1).take(Peer::Unknown).is_some());
    }
}
