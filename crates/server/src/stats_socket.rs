//! Statistics socket (`--stats-socket`) for `shadowbell top`: answers each line with one line of
//! JSON, a [`Snapshot`]. The content of the line is ignored.
//!
//! The client determines the rate: there is no timer, and nothing extra is counted. The I/O
//! threads are asked for their counters by a message that they answer between two passes, at most
//! once per [`FRESH`]. A client that does not read its answer is disconnected after
//! [`WRITE_TIMEOUT`]; other clients wait meanwhile, but guests do not. Only root and the server's
//! own user are answered.

use super::path_broker;
use super::registry::Registry;
use super::server::Server;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SocketFlags, accept_with, recvmsg};
use serde::{Deserialize, Serialize};
use shadowbell_control_api::live_stats::{Row, Snapshot, VERSION};
use shadowbell_memory::EventFd;
use shadowbell_process::exit::bad_input;
use shadowbell_state::{Descriptors, FdRef, StateError};
use shadowbell_supervisor::path_protocol::Kind;
use shadowbell_supervisor::protocol::is_ours;
use shadowbell_vfio_user::Listener;
use shadowbell_vfio_user::server::{BindError, SavedListener};
use std::io::{self, IoSliceMut};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{debug, warn};

/// Time for which an answer is reused for other clients.
const FRESH: Duration = Duration::from_millis(50);
/// Time limit for a client to read its answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of clients. Further ones are disconnected.
const MAX_CLIENTS: usize = 8;
/// Delay before the next accept if the system has no descriptor for a client.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);

/// Creates the socket.
///
/// # Errors
/// The socket cannot be created.
pub(super) fn listen(path: &Path) -> anyhow::Result<Listener> {
    let listener = path_broker::listen(path, Kind::Plain).map_err(|error| match error {
        BindError::System { .. } => anyhow::Error::from(error),
        _ => bad_input(error),
    });
    listener.map_err(|error| error.context("--stats-socket"))
}

/// The thread that answers. A drop ends it.
pub(super) struct StatsSocket {
    stop: EventFd,
    thread: Option<JoinHandle<RestingStats>>,
}

/// Socket and clients while no thread serves them.
pub(super) struct RestingStats {
    socket: Listener,
    began: Instant,
    clients: Vec<UnixStream>,
}

/// Serialized [`RestingStats`], for another process.
#[derive(Serialize, Deserialize)]
pub(super) struct SavedStats {
    socket: SavedListener,
    /// Nanoseconds since the start of the counters.
    elapsed: u64,
    clients: Vec<FdRef>,
}

impl RestingStats {
    /// Wraps a new socket without clients.
    pub(super) fn new(socket: Listener) -> Self {
        Self { socket, began: Instant::now(), clients: Vec::new() }
    }

    /// Serializes the socket and its clients for another process.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedStats> {
        let clients = self.clients.iter();
        let clients: io::Result<Vec<_>> =
            clients.map(|client| Ok(fds.add(client.try_clone()?.into()))).collect();
        Ok(SavedStats {
            socket: self.socket.save(fds)?,
            elapsed: since(self.began),
            clients: clients?,
        })
    }

    /// Restores what [`save`](Self::save) has serialized. Until this is
    /// [started](StatsSocket::start), the other process may resume.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub(super) fn restore(saved: SavedStats, fds: &mut Descriptors) -> anyhow::Result<Self> {
        let now = Instant::now();
        let clients = saved.clients.into_iter();
        let clients: Result<Vec<_>, StateError> =
            clients.map(|client| Ok(UnixStream::from(fds.take(client)?))).collect();
        Ok(Self {
            socket: Listener::restore(&saved.socket, fds)?,
            began: now.checked_sub(Duration::from_nanos(saved.elapsed)).unwrap_or(now),
            clients: clients?,
        })
    }

    /// Drops the socket without removing its file: another process serves it.
    pub(super) fn leave(mut self) {
        self.socket.set_lent(true);
    }
}

fn since(began: Instant) -> u64 {
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

impl StatsSocket {
    /// Starts the thread, for new and for connected clients.
    ///
    /// # Errors
    /// The thread cannot be started, or the descriptor limit is reached.
    pub(super) fn start(mut resting: RestingStats, server: &Server) -> io::Result<Self> {
        resting.socket.set_lent(false);
        let stop = EventFd::new()?;
        let controllers = Arc::clone(server.registry());
        let RestingStats { socket, began, clients } = resting;
        let mut answerer = Answerer { controllers, began, answer: None, clients };
        let until = stop.try_clone()?;
        let thread = std::thread::Builder::new().name("sb-stats".into());
        let thread = thread.spawn(move || {
            answerer.serve(&socket, &until);
            RestingStats { socket, began, clients: answerer.clients }
        })?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Stops the thread and returns the socket. `None` if the thread has panicked.
    pub(super) fn rest(mut self) -> Option<RestingStats> {
        self.stop.signal();
        self.thread.take()?.join().ok()
    }
}

impl Drop for StatsSocket {
    fn drop(&mut self) {
        self.stop.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Answerer {
    controllers: Arc<Registry>,
    began: Instant,
    /// Last answer and its time.
    answer: Option<(Instant, Vec<u8>)>,
    clients: Vec<UnixStream>,
}

impl Answerer {
    fn serve(&mut self, socket: &Listener, until: &EventFd) {
        loop {
            let (ended, new, mut ready) = {
                let fds = [until.as_fd(), socket.as_fd()];
                let fds = fds.into_iter().chain(self.clients.iter().map(AsFd::as_fd));
                let mut fds: Vec<_> =
                    fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
                match poll(&mut fds, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(errno) => return warn!("cannot serve the statistics socket: {errno}"),
                }
                let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
                let mut next = || ready.next().unwrap_or_default();
                (next(), next(), ready.collect::<Vec<bool>>().into_iter())
            };
            if ended {
                return;
            }
            for mut client in std::mem::take(&mut self.clients) {
                if !ready.next().unwrap_or_default() || self.serve_client(&mut client) {
                    self.clients.push(client);
                }
            }
            if new {
                self.accept(socket);
            }
        }
    }

    fn accept(&mut self, socket: &Listener) {
        let stream = match accept_with(socket, SocketFlags::CLOEXEC) {
            Ok(stream) => stream,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                return std::thread::sleep(RETRY_ACCEPT);
            }
            Err(_) => return,
        };
        if !is_ours(&stream) {
            return warn!("refused a client of another user at the statistics socket");
        }
        let stream = UnixStream::from(stream);
        if self.clients.len() < MAX_CLIENTS && stream.set_write_timeout(Some(WRITE_TIMEOUT)).is_ok()
        {
            self.clients.push(stream);
        } else {
            debug!("too many clients of the statistics socket");
        }
    }

    /// Answers a client that has sent something. Returns false if it is to be disconnected.
    fn serve_client(&mut self, client: &mut UnixStream) -> bool {
        let mut request = [0; 4096];
        match receive_now(client, &mut request) {
            Ok(0) => false,
            Ok(len) if !request[..len].contains(&b'\n') => true,
            Ok(_) => write_all(client, self.answer()).is_ok(),
            Err(errno) => matches!(errno, Errno::AGAIN | Errno::INTR),
        }
    }

    fn answer(&mut self) -> &[u8] {
        if self.answer.as_ref().is_none_or(|(since, _)| since.elapsed() >= FRESH) {
            let at_ns = since(self.began);
            let served = self.controllers.all();
            let rows = served.iter().map(|s| Row::of(&s.name, &s.controller));
            let controllers = rows.collect();
            let snapshot = Snapshot { version: VERSION, at_ns, controllers };
            // Numbers and strings only: serialization cannot fail.
            let mut line = serde_json::to_vec(&snapshot).unwrap_or_default();
            line.push(b'\n');
            self.answer = Some((Instant::now(), line));
        }
        self.answer.as_ref().map_or(&[], |(_, line)| line)
    }
}

/// Writes to a client by `write`, within the socket's timeout. The standard library uses `send`,
/// which the sandbox would have to allow.
fn write_all(client: &UnixStream, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        let written = rustix::io::retry_on_intr(|| rustix::io::write(client, bytes))?;
        bytes = bytes.get(written..).unwrap_or_default();
    }
    Ok(())
}

/// Receives from a client. Does not block.
fn receive_now(client: &UnixStream, into: &mut [u8]) -> Result<usize, Errno> {
    let mut nothing = RecvAncillaryBuffer::default();
    let into = &mut [IoSliceMut::new(into)];
    Ok(recvmsg(client, into, &mut nothing, RecvFlags::DONTWAIT)?.bytes)
}
