//! Management endpoint: the control socket, whose threads stop for an upgrade.

use super::control::{ControlListeners, ControlSocket, SavedControl, ServerState};
use super::server::Server;
use super::wait_sampler::WaitSampler;
use super::worker_link::UpgradeRequester;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_config::config_file::write::Settings;
use shadowbell_config::server_config::ServerConfig;
use shadowbell_state::Descriptors;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use tracing::{info, warn};

/// Sockets of the endpoints while no thread serves them.
pub(super) struct Endpoints {
    /// `None` if the previous process had no control socket.
    control: Option<ControlListeners>,
}

/// Serialized [`Endpoints`], for the next process.
#[derive(Serialize, Deserialize)]
pub(super) struct SavedEndpoints {
    control: Option<SavedControl>,
}

/// Threads that serve the endpoints.
pub(super) struct RunningEndpoints {
    control: Option<ControlSocket>,
}

/// Data and operations of the process for the control socket.
#[derive(Clone)]
pub(super) struct ProcessControl {
    pub(super) supervisor_pid: Option<u32>,
    pub(super) end: Arc<dyn Fn() + Send + Sync>,
    pub(super) serves_since: Instant,
    pub(super) upgrade_error: Arc<Mutex<Option<String>>>,
    /// Requester that asks the supervisor for an upgrade, for a sandboxed process: this process
    /// cannot connect to the supervisor's control socket.
    pub(super) upgrade_requester: Option<UpgradeRequester>,
}

impl Endpoints {
    /// Creates the configured sockets.
    ///
    /// # Errors
    /// A socket cannot be created.
    pub(super) fn listen(
        config: &ServerConfig,
        supervisor_pid: Option<u32>,
    ) -> anyhow::Result<Self> {
        Ok(Self { control: Some(listen_control(config, supervisor_pid)?) })
    }

    /// Creates the sockets again after a crash. Errors are only logged, because guests need no
    /// control socket.
    pub(super) fn listen_again(config: &ServerConfig, supervisor_pid: Option<u32>) -> Self {
        let control = listen_control(config, supervisor_pid)
            .inspect_err(|why| warn!("there is no control socket: {why:#}"));
        Self { control: control.ok() }
    }

    /// Serializes the sockets for the next process.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedEndpoints> {
        let control = self.control.as_ref().map(|control| control.save(fds)).transpose()?;
        Ok(SavedEndpoints { control })
    }

    /// Restores the sockets that [`save`](Self::save) has serialized.
    ///
    /// # Errors
    /// A descriptor is missing.
    pub(super) fn restore(saved: SavedEndpoints, fds: &mut Descriptors) -> anyhow::Result<Self> {
        let control =
            saved.control.map(|saved| ControlListeners::restore(saved, fds)).transpose()?;
        Ok(Self { control })
    }

    /// Starts the threads that serve new and queued clients.
    ///
    /// # Errors
    /// A thread cannot be started, or the descriptor limit is reached.
    pub(super) fn start(
        self,
        server: &Server,
        config: &ServerConfig,
        process_control: &ProcessControl,
    ) -> anyhow::Result<RunningEndpoints> {
        // If the previous process had no control socket, one is created. An error is not fatal,
        // because guests need no control socket.
        let control = match self.control {
            Some(control) => Ok(control),
            None => listen_control(config, process_control.supervisor_pid),
        };
        let control = match control {
            Ok(control) => start_control(control, server, config, process_control)?,
            Err(why) => {
                warn!("there is no control socket: {why:#}");
                None
            }
        };
        Ok(RunningEndpoints { control })
    }
}

fn listen_control(
    config: &ServerConfig,
    supervisor_pid: Option<u32>,
) -> anyhow::Result<ControlListeners> {
    let pid = supervisor_pid.unwrap_or_else(std::process::id);
    let listeners =
        ControlListeners::listen(&config.control, &config.default_name, pid, config.metrics)?;
    if let Some(address) = listeners.metrics() {
        info!("metrics are at http://{address}/metrics, without access control");
    }
    Ok(listeners)
}

fn start_control(
    listeners: ControlListeners,
    server: &Server,
    config: &ServerConfig,
    process_control: &ProcessControl,
) -> io::Result<Option<ControlSocket>> {
    let end = Arc::clone(&process_control.end);
    let state = ServerState {
        name: listeners.name().to_owned(),
        began: listeners.began(),
        serves_since: process_control.serves_since,
        workers: server.workers(),
        supervisor_pid: process_control.supervisor_pid,
        controllers: Arc::clone(server.registry()),
        changes: Arc::clone(server.changes()),
        settings: Settings::of(config),
        end: Box::new(move || end()),
        upgrade_error: Arc::clone(&process_control.upgrade_error),
        upgrade_requester: process_control.upgrade_requester.clone(),
        tracer: Arc::clone(server.tracer()),
        waits: WaitSampler::default(),
    };
    ControlSocket::start(listeners, Arc::new(state))
}

impl RunningEndpoints {
    /// Stops the threads and returns their sockets.
    pub(super) fn stop(self) -> Endpoints {
        // A thread that has panicked returns `None`; the panic ends the process.
        Endpoints { control: self.control.and_then(ControlSocket::stop) }
    }
}
