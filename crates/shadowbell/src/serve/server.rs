//! What runs: workers, a reactor and controllers, from start to stop.

use super::event::{EventQueue, ServerEvent};
use super::flush::flush;
use super::server_config::{ServerConfig, SocketConfig, WorkerChoice};
use crate::controller_config::{ConfigureError, OfferedDoorbells};
use crate::exit::bad_input;
use anyhow::{Context, anyhow};
use bytesize::ByteSize;
use shadowbell_controller::trace::TraceFile;
use shadowbell_controller::{Carrier, Config, Controller, Pool};
use shadowbell_frontend::vfio_user::{ClientEventHandler, ControllerDevice};
use shadowbell_vfio_user::server::{BindError, Handle, Limits, Listener, Reactor};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use tracing::{error, info};

/// A controller that is served.
pub(super) struct ServedController {
    /// Its socket, as it was written.
    pub(super) name: String,
    pub(super) controller: Controller,
}

/// All that runs.
pub(super) struct Server {
    controllers: Vec<ServedController>,
    events: Option<EventQueue>,
    reactor: Option<(Handle, JoinHandle<io::Result<()>>)>,
    /// Keeps the workers.
    _pool: Pool,
}

impl Server {
    /// Starts to serve what `config` asks for; all of it, or nothing. `ended` runs when serving
    /// came to its end, on a thread of its own.
    ///
    /// # Errors
    /// The first thing that can not be done, with the place where it was asked for.
    pub(super) fn start(
        config: &ServerConfig,
        ended: impl FnOnce() + Send + 'static,
    ) -> anyhow::Result<Self> {
        let configs = open(config)?;
        let pool = Pool::start(&config.pool).context("the workers can not be started")?;
        let events = EventQueue::new();
        let mut controllers = Vec::with_capacity(configs.len());
        let mut devices = Vec::with_capacity(configs.len());
        let served_configs = config.controllers.iter().zip(configs);
        for (index, (served, controller_config)) in served_configs.enumerate() {
            let sender = events.sender(index);
            let of_controller = sender.clone();
            let carrier = Carrier {
                mapped_doorbells: served.controller.doorbells == OfferedDoorbells::Mapped,
                listener: Some(Box::new(move |event| {
                    of_controller.send(ServerEvent::Controller(*event));
                })),
            };
            let controller = Controller::new(controller_config, pool.clone(), carrier)?;
            match served.worker {
                None => {}
                Some(WorkerChoice::Own(_)) => controller.isolate()?,
                Some(WorkerChoice::Shared(worker)) => controller.pin_to(worker)?,
            }
            let on_client_event: ClientEventHandler =
                Arc::new(move |event| sender.send(ServerEvent::Client(event)));
            devices.push(ControllerDevice::new(controller.clone(), on_client_event)?);
            let name = served.socket.display().to_string();
            controllers.push(ServedController { name, controller });
        }
        let listeners = bind(&config.controllers)?;
        if let Some((path, records)) = &config.trace {
            start_trace(&pool, path, *records)?;
        }
        for served in &controllers {
            info!("{}", summary(served));
        }
        let mut reactor = Reactor::new(Limits::default())?;
        for (listener, device) in listeners.into_iter().zip(devices) {
            reactor.add(listener, Box::new(device))?;
        }
        let handle = reactor.handle();
        let thread = std::thread::Builder::new().name("sb-reactor".into()).spawn(move || {
            let outcome = reactor.run().map(drop);
            drop(reactor);
            ended();
            outcome
        })?;
        Ok(Self { controllers, events: Some(events), reactor: Some((handle, thread)), _pool: pool })
    }

    /// The controllers, in the order of the configuration.
    pub(super) fn controllers(&self) -> &[ServedController] {
        &self.controllers
    }

    /// What happens from here on, for the log; there is one.
    pub(super) fn take_events(&mut self) -> Option<EventQueue> {
        self.events.take()
    }

    /// Lets all clients go and removes the sockets. Returns when no client's memory is touched any
    /// more.
    ///
    /// # Errors
    /// The reactor had come to its end by itself.
    pub(super) fn stop(&mut self) -> anyhow::Result<()> {
        let Some((handle, thread)) = self.reactor.take() else { return Ok(()) };
        handle.stop();
        match thread.join() {
            Ok(outcome) => outcome.context("the sockets can not be served any more"),
            Err(_) => Err(anyhow!("the thread that serves the sockets has panicked")),
        }
    }

    /// Has the disks keep what they were given. Whether all of them do.
    #[must_use]
    pub(super) fn flush(&self) -> bool {
        let namespaces = self.controllers.iter().flat_map(|s| &s.controller.config().namespaces);
        let mut all = true;
        for namespace in namespaces {
            if let Err(error) = flush(&*namespace.disk) {
                error!("{} can not be flushed: {error}", namespace.disk.name());
                all = false;
            }
        }
        all
    }
}

/// Has the workers record what they decide about doorbells.
fn start_trace(pool: &Pool, path: &Path, records: u32) -> anyhow::Result<()> {
    let workers = u16::try_from(pool.len()).unwrap_or(u16::MAX);
    let trace = TraceFile::create(path, workers, records).map_err(|error| {
        let known =
            matches!(error.kind(), io::ErrorKind::AlreadyExists | io::ErrorKind::InvalidInput);
        let error = anyhow!(error).context(format!("--trace {}", path.display()));
        if known { bad_input(error) } else { error }
    })?;
    pool.trace(&trace);
    Ok(())
}

/// Opens what the controllers need. Creates nothing.
fn open(server: &ServerConfig) -> anyhow::Result<Vec<Config>> {
    let mut configs = Vec::with_capacity(server.controllers.len());
    for served in &server.controllers {
        let config = served.controller.open(&served.absolute_socket().to_string_lossy());
        configs.push(with_origin(served, config.map_err(ConfigureError::into_error))?);
    }
    Ok(configs)
}

/// Listens at all sockets, or at none.
fn bind(controllers: &[SocketConfig]) -> anyhow::Result<Vec<Listener>> {
    let mut listeners = Vec::with_capacity(controllers.len());
    for served in controllers {
        let listener = Listener::bind(&served.socket).map_err(|error| match error {
            BindError::System { .. } => error.into(),
            _ => bad_input(error),
        });
        listeners.push(with_origin(served, listener)?);
    }
    Ok(listeners)
}

fn with_origin<T>(served: &SocketConfig, outcome: anyhow::Result<T>) -> anyhow::Result<T> {
    match &served.origin {
        None => outcome,
        Some(origin) => outcome.with_context(|| origin.clone()),
    }
}

fn summary(served: &ServedController) -> String {
    let namespaces = &served.controller.config().namespaces;
    let disks: Vec<_> = namespaces
        .iter()
        .map(|namespace| {
            let info = namespace.disk.info();
            let read_only = if info.read_only { ", read-only" } else { "" };
            format!(
                "{} ({}{read_only})",
                namespace.disk.name(),
                ByteSize(info.bytes()).display().iec()
            )
        })
        .collect();
    format!("{}: serving {}", served.name, disks.join(", "))
}
