//! Control socket: HTTP/1.1 with JSON for `shadowbell ctl` and other programs, and `/metrics`.
//!
//! # Architecture
//!
//! | module | contents |
//! |---|---|
//! | `http` | connections and their limits |
//! | `routes` | request paths and methods |
//! | `parameters` | parameters of a request's path and query |
//! | `state` | the part of the server that requests see |
//! | `handlers` | request handlers and the OpenAPI document |
//! | `trace` | handlers for the doorbell trace |
//! | `explain` | causes for which commands wait |
//! | `metrics` | counters for Prometheus |
//! | `seats` | limit of connections, and eviction of idle ones |
//! | `socket_io` | socket I/O with few system calls |
//!
//! One thread (`sb-api`) serves the sockets. Requests that may block run on at most [`BLOCKING`]
//! other threads. These threads exist only while there are blocking requests, and hold no lock that
//! the reactor or an I/O thread takes. Without clients no timer runs.
//!
//! At an upgrade, the next process gets the listening sockets, and accepted connections of which
//! nothing was read. Requests in execution have 50 ms to end, or are answered by 503 Service
//! Unavailable. An idle connection that has had a response is closed: HTTP permits this at any
//! time. Clients that connect during the upgrade wait in the listen queue.

mod ana;
mod controllers;
mod disks;
mod explain;
mod exports;
mod handlers;
mod http;
mod identify;
mod latency;
mod limit_groups;
mod lookup;
mod metrics;
mod namespaces;
mod parameters;
mod routes;
mod seats;
mod server;
mod socket_io;
mod state;
mod trace;

pub(super) use state::ServerState;

use self::http::Source;
use crate::path_broker;
use anyhow::{Context, anyhow};
use serde::{Deserialize, Serialize};
use shadowbell_config::socket_path::{self, SocketPath};
use shadowbell_process::exit::{bad_input, unavailable, unusable};
use shadowbell_process::logging;
use shadowbell_state::{Descriptors, FdRef};
use shadowbell_supervisor::path_protocol::Kind;
use shadowbell_vfio_user::Listener;
use shadowbell_vfio_user::server::{BindError, SavedListener};
use std::fs::DirBuilder;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tracing::{debug, info, warn};

/// Maximum number of threads for requests that may block.
const BLOCKING: usize = 4;

/// Control and metrics sockets while no thread serves them.
pub(super) struct ControlListeners {
    /// Name of the server.
    name: String,
    /// Control socket. `None` if there is only the metrics socket.
    socket: Option<Socket>,
    metrics: Option<TcpListener>,
    /// Accepted connections to the metrics socket of which nothing was read.
    metrics_clients: Vec<OwnedFd>,
    /// Address of the metrics socket, if this process has created it.
    metrics_at: Option<SocketAddr>,
    /// Time at which counting began.
    began: Instant,
    /// Number of records per I/O thread of the in-memory trace, if one was on.
    tracing: Option<u32>,
    /// True if the previous process measured latency. `None` if there was no previous process.
    measures: Option<bool>,
}

struct Socket {
    listener: Listener,
    /// Accepted connections of which nothing was read.
    clients: Vec<OwnedFd>,
    /// Directory of the socket. Declared after the listener, so that it is removed after the socket
    /// file.
    directory: Option<OwnDirectory>,
}

/// A directory that was created for the socket, and is removed at the end if it is empty.
struct OwnDirectory(PathBuf);

impl Drop for OwnDirectory {
    fn drop(&mut self) {
        path_broker::remove_directory(&self.0);
    }
}

/// Serialized [`ControlListeners`], for another process.
#[derive(Serialize, Deserialize)]
pub(super) struct SavedControl {
    name: String,
    socket: Option<SavedListener>,
    directory: Option<PathBuf>,
    metrics: Option<FdRef>,
    /// Accepted connections of which nothing was read: to the control socket, and to the metrics
    /// socket.
    #[serde(default)]
    clients: [Vec<FdRef>; 2],
    /// Nanoseconds since counting began.
    elapsed: u64,
    /// Log filter, if it was changed at run time.
    log_filter: Option<String>,
    /// Number of records per I/O thread of the in-memory trace, if one is on.
    #[serde(default)]
    tracing: Option<u32>,
    /// True if latency is measured.
    #[serde(default)]
    measures: Option<bool>,
}

impl ControlListeners {
    /// Creates the sockets. `default_name`: name of the server if none is configured. `pid`: number
    /// that is appended to the default name if another server has this name.
    ///
    /// # Errors
    /// A configured socket cannot be created. If the default control socket cannot be created, a
    /// warning is logged instead.
    pub(super) fn listen(
        place: &SocketPath,
        default_name: &str,
        pid: u32,
        metrics: Option<SocketAddr>,
    ) -> anyhow::Result<Self> {
        let metrics = metrics.map(listen_tcp).transpose()?;
        let (metrics, metrics_at) = metrics.unzip();
        let name = place.name.clone().unwrap_or_else(|| default_name.to_owned());
        let began = Instant::now();
        let of = |name, socket| {
            let (tracing, measures) = (None, None);
            let metrics_clients = Vec::new();
            Self { name, socket, metrics, metrics_clients, metrics_at, began, tracing, measures }
        };
        if let Some(path) = &place.path {
            let listener = path_broker::listen(path, Kind::Private)
                .map_err(refused)
                .context("the control socket")?;
            let socket = Some(Socket { listener, clients: Vec::new(), directory: None });
            return Ok(of(name, socket));
        }
        let Some(directory) = socket_path::directory() else {
            if place.name.is_some() {
                return Err(bad_input(anyhow!(
                    "--name: XDG_RUNTIME_DIR is not set, so there is no usual place for the \
                     control socket; name one by `--control-socket PATH`"
                )));
            }
            debug!("no control socket: XDG_RUNTIME_DIR is not set");
            return Ok(of(name, None));
        };
        let outcome = match listen_in(&directory, &name) {
            // Another server has the same default name.
            Err(BindError::InUse { .. }) if place.name.is_none() => {
                let own = socket_path::name_for(&name, pid);
                info!(
                    "another server is called {name}, so this one is {own} to `shadowbell ctl`; \
                     `--name` gives it a name of your choice"
                );
                listen_in(&directory, &own).map(|socket| (own, socket))
            }
            outcome => outcome.map(|socket| (name.clone(), socket)),
        };
        match outcome {
            Ok((name, socket)) => Ok(of(name, Some(socket))),
            Err(error) if place.name.is_some() => Err(refused(error).context("the control socket")),
            Err(error) => {
                warn!("`shadowbell ctl` will not find this server: {error}");
                Ok(of(name, None))
            }
        }
    }

    /// Serializes the sockets and settings for another process.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedControl> {
        let metrics = self.metrics.as_ref().map(TcpListener::try_clone).transpose()?;
        let mut save = |clients: &[OwnedFd]| {
            let fds = clients.iter().map(|client| Ok(fds.add(client.try_clone()?)));
            fds.collect::<io::Result<Vec<_>>>()
        };
        let of_socket = self.socket.as_ref().map_or(&[][..], |socket| &socket.clients);
        let clients = [save(of_socket)?, save(&self.metrics_clients)?];
        Ok(SavedControl {
            clients,
            name: self.name.clone(),
            socket: self.socket.as_ref().map(|socket| socket.listener.save(fds)).transpose()?,
            directory: self.directory(),
            metrics: metrics.map(|listener| fds.add(listener.into())),
            elapsed: u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX),
            log_filter: logging::changed_filter(),
            tracing: self.tracing,
            measures: self.measures,
        })
    }

    /// Restores the sockets and settings that [`save`](Self::save) has serialized.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub(super) fn restore(saved: SavedControl, fds: &mut Descriptors) -> anyhow::Result<Self> {
        let directory = saved.directory.map(OwnDirectory);
        let [clients, metrics_clients] = saved.clients.map(|clients| {
            clients.into_iter().filter_map(|client| fds.take(client).ok()).collect()
        });
        let socket = saved.socket.map(|socket| {
            let listener = Listener::restore(&socket, fds)?;
            Ok::<_, anyhow::Error>(Socket { listener, clients, directory })
        });
        let metrics = saved.metrics.map(|fd| fds.take(fd)).transpose()?;
        if let Some(filter) = saved.log_filter {
            let _ = logging::set_filter(&filter);
        }
        let now = Instant::now();
        Ok(Self {
            began: now.checked_sub(Duration::from_nanos(saved.elapsed)).unwrap_or(now),
            name: saved.name,
            socket: socket.transpose()?,
            metrics: metrics.map(TcpListener::from),
            metrics_clients,
            metrics_at: None,
            tracing: saved.tracing,
            measures: saved.measures,
        })
    }

    fn directory(&self) -> Option<PathBuf> {
        self.socket.as_ref()?.directory.as_ref().map(|own| own.0.clone())
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn began(&self) -> Instant {
        self.began
    }

    /// Address of the metrics socket.
    pub(super) fn metrics(&self) -> Option<SocketAddr> {
        self.metrics_at
    }
}

fn listen_tcp(address: SocketAddr) -> anyhow::Result<(TcpListener, SocketAddr)> {
    let listener = path_broker::listen_tcp(address);
    listener.with_context(|| format!("--metrics {address}")).map_err(unusable)
}

fn refused(error: BindError) -> anyhow::Error {
    match error {
        BindError::System { .. } => error.into(),
        _ if error.can_pass() => unavailable(error),
        _ => bad_input(error),
    }
}

/// Creates the control socket of the server `name`, and the directories for it.
fn listen_in(directory: &Path, name: &str) -> Result<Socket, BindError> {
    let path = socket_path::socket(directory, name);
    let own = directory.join(name);
    if path_broker::has_broker() {
        // The supervisor creates the directory with the socket.
        let listener = path_broker::listen(&path, Kind::Private)?;
        return Ok(Socket { listener, clients: Vec::new(), directory: Some(OwnDirectory(own)) });
    }
    let made = DirBuilder::new().recursive(true).mode(0o755).create(directory).and_then(|()| {
        match DirBuilder::new().mode(0o700).create(&own) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            outcome => outcome,
        }
    });
    made.map_err(|source| BindError::System {
        path: path.clone(),
        what: "created".into(),
        source,
    })?;
    let listener = path_broker::listen(&path, Kind::Private)?;
    Ok(Socket { listener, clients: Vec::new(), directory: Some(OwnDirectory(own)) })
}

/// Thread that serves the sockets. A drop ends the thread.
pub(super) struct ControlSocket {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<ControlListeners>>,
}

impl ControlSocket {
    /// Starts the thread. `None` if there is no socket to serve.
    ///
    /// # Errors
    /// A thread cannot be started, or the descriptor limit is reached.
    pub(super) fn start(
        mut listeners: ControlListeners,
        state: Arc<ServerState>,
    ) -> io::Result<Option<Self>> {
        if let Some(socket) = &mut listeners.socket {
            socket.listener.set_lent(false);
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(BLOCKING)
            .thread_name("sb-api-work")
            .build()?;
        let source = |listener: &dyn AsFd, clients: &mut Vec<OwnedFd>| {
            let listener = listener.as_fd().try_clone_to_owned()?;
            Ok::<_, io::Error>(Source { listener, clients: std::mem::take(clients) })
        };
        let ControlListeners { socket, metrics, metrics_clients, .. } = &mut listeners;
        let control = socket.as_mut().map(|one| source(&one.listener, &mut one.clients));
        let metrics = metrics.as_ref().map(|tcp| source(tcp, metrics_clients));
        let sources = [control.transpose()?, metrics.transpose()?];
        if sources.iter().all(Option::is_none) {
            return Ok(None);
        }
        if let Some(records) = listeners.tracing
            && let Err(error) = state.tracer.start(Some(records))
        {
            warn!("the doorbell trace has ended: {error}");
        }
        if let Some(on) = listeners.measures {
            state.tracer.measure(on);
        }
        let (stop, until) = oneshot::channel();
        let thread = std::thread::Builder::new().name("sb-api".into());
        let thread = thread.spawn(move || {
            let tracer = Arc::clone(&state.tracer);
            match runtime.block_on(http::serve(sources, state, until)) {
                Ok([of_socket, of_metrics]) => {
                    if let Some(socket) = &mut listeners.socket {
                        socket.clients = of_socket;
                    }
                    listeners.metrics_clients = of_metrics;
                }
                Err(error) => warn!("cannot serve the control socket: {error}"),
            }
            // The threads of requests that still wait are not joined: they end by themselves.
            runtime.shutdown_background();
            listeners.tracing = tracer.in_memory();
            listeners.measures = Some(tracer.measures());
            listeners
        })?;
        Ok(Some(Self { stop: Some(stop), thread: Some(thread) }))
    }

    /// Stops the thread and returns the sockets. `None` if the thread has panicked.
    pub(super) fn stop(mut self) -> Option<ControlListeners> {
        drop(self.stop.take());
        self.thread.take()?.join().ok()
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
