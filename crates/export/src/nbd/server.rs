//! NBD server: the listening socket, and the threads of its clients.

use super::address::Address;
use super::admission::{Clients, NewClient, Peer};
use super::connection;
use super::options::Options;
use super::shared::{Registered, ServerShared};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{SocketAddrAny, SocketFlags, acceptfrom_with};
use shadowbell_block::{BlockDevice, QueueThread};
use shadowbell_memory::EventFd;
use shadowbell_nbd::wire::MAX_STRING;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Pause after a failed accept, for example if no descriptor is free.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Reason for which a server could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// The name of the export is too long.
    #[error("an export's name has at most {MAX_STRING} bytes, and this one {len}")]
    Name {
        /// Length of the name in bytes.
        len: usize,
    },
    /// A thread or descriptor cannot be created.
    #[error("the server cannot be started: {0}")]
    System(io::Error),
}

/// Listening socket.
pub enum Listener {
    /// UNIX socket, whose file is removed at the end.
    Unix(shadowbell_vfio_user::Listener),
    /// Non-blocking TCP socket.
    Tcp(TcpListener),
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// NBD server. A drop has the same effect as [`stop`](Self::stop).
pub struct Server {
    shared: Arc<ServerShared>,
    thread: Option<JoinHandle<()>>,
    address: Address,
}

impl Server {
    /// Serves `disk` on `listener`, whose address is `address`.
    ///
    /// # Errors
    /// [`StartError`] if the name is too long, or the thread cannot be started.
    pub fn start(
        disk: BlockDevice,
        listener: Listener,
        address: Address,
        options: &Options,
    ) -> Result<Self, StartError> {
        if options.name.len() > MAX_STRING {
            return Err(StartError::Name { len: options.name.len() });
        }
        let shared = Arc::new(ServerShared::new(disk, options));
        let event = EventFd::new().map_err(StartError::System)?;
        let waker = event.try_clone().map_err(StartError::System)?;
        let registered = shared.register(waker);
        let accept = Accept {
            listener,
            event,
            shared: Arc::clone(&shared),
            clients: Clients::default(),
            count: 0,
            _registered: registered,
        };
        let thread = std::thread::Builder::new()
            .name("nbd".into())
            .spawn(move || accept.run())
            .map_err(StartError::System)?;
        Ok(Self { shared, thread: Some(thread), address })
    }

    /// Listen address, with the port that the system chose for port 0.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Offers another disk, or another size of the disk, to the clients that connect from now on.
    /// Connected clients keep the disk that they have, because the protocol has no message for a
    /// change. If `disconnects` is true, the requests of these clients are completed, and then the
    /// clients are disconnected.
    pub fn replace_disk(&self, disk: BlockDevice, disconnects: bool) {
        self.shared.replace_disk(disk, disconnects);
    }

    /// Number of requests that failed because of the disk.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.shared.failures.count()
    }

    /// Stops the server: it takes no more requests, completes those in flight, and sends their
    /// replies. If a client does not receive its replies within five seconds, it is disconnected.
    /// Returns the number of requests that failed because of the disk.
    #[must_use]
    pub fn stop(self) -> u64 {
        let shared = Arc::clone(&self.shared);
        drop(self);
        shared.failures.count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Thread that accepts clients.
struct Accept {
    listener: Listener,
    event: EventFd,
    shared: Arc<ServerShared>,
    clients: Clients,
    count: usize,
    _registered: Registered,
}

impl Accept {
    fn run(mut self) {
        while !self.shared.is_ending() {
            let mut fds = [
                PollFd::from_borrowed_fd(self.event.as_fd(), PollFlags::IN),
                PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            ];
            let _ = poll(&mut fds, None);
            self.event.drain();
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match acceptfrom_with(self.listener.as_fd(), flags) {
                Ok((socket, address)) => self.admit(socket, address),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => {
                    tracing::warn!("a client could not be accepted: {errno}");
                    // The process is out of a resource, such as descriptors, and the client still
                    // waits to be accepted. An immediate retry would fail again, so the thread
                    // pauses first.
                    let _ = self.event.wait(Some(ACCEPT_RETRY));
                }
            }
        }
        // The listener is dropped before the wait for the clients: so no client can connect any
        // more, and the socket file is removed.
        let Self { listener, clients, .. } = self;
        drop(listener);
        clients.join();
    }

    fn admit(&mut self, socket: OwnedFd, address: Option<SocketAddrAny>) {
        let peer = Peer::of(socket.as_fd(), address);
        if self.shared.admitted.is_full(peer) {
            self.shared.log.warn("too many clients: further connections are refused");
            return;
        }
        self.clients.make_room();
        let again = match rustix::io::fcntl_dupfd_cloexec(&socket, 0) {
            Ok(again) => again,
            Err(errno) => {
                self.shared.log.warn(format_args!("a client could not be accepted: {errno}"));
                return;
            }
        };
        let new = NewClient::new(peer, again);
        if matches!(self.listener, Listener::Tcp(_)) {
            // The server itself sends several replies together, so Nagle's algorithm would only
            // delay them.
            let _ = rustix::net::sockopt::set_tcp_nodelay(&socket, true);
        }
        let number = self.count;
        self.count = self.count.wrapping_add(1);
        let shared = Arc::clone(&self.shared);
        let added = self.clients.add(new, |new| {
            QueueThread::spawn(format!("nbd-{number}"), move || {
                tracing::debug!(client = number, "connected");
                match connection::serve(socket, new, &shared) {
                    Ok(()) => tracing::debug!(client = number, "gone"),
                    Err(why) => shared.log.warn(format_args!("client {number}: {why}")),
                }
            })
        });
        if let Err(error) = added {
            self.shared.log.warn(format_args!("a client could not be accepted: {error}"));
        }
    }
}
