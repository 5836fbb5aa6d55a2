//! Running server: I/O threads, reactor and controllers, from start to stop.

use super::builder::{assign_io_thread, bind_one, carrier, client_events, open_one, summary};
use super::event::EventQueue;
use super::flush::flush;
use super::open_files;
use super::reactor_thread::ReactorThread;
use super::reconfigure::Changes;
use super::registry::{Registry, ServedController};
use super::tracer::Tracer;
use anyhow::{Context, anyhow};
use shadowbell_config::server_config::{ServerConfig, duplicate_disk};
use shadowbell_controller::{Config, Controller, Pool};
use shadowbell_disk::Disk;
use shadowbell_frontend::vfio_user::ControllerDevice;
use shadowbell_process::descriptor_limit;
use shadowbell_process::exit::bad_input;
use shadowbell_storage::disk_open;
use shadowbell_vfio_user::server::{Limits, PortId, Reactor};
use std::io;
use std::sync::Arc;
use std::time::Instant;
use tracing::{error, info};

/// A server: I/O threads, reactor and controllers.
pub(super) struct Server {
    controllers: Arc<Registry>,
    changes: Arc<Changes>,
    events: Option<EventQueue>,
    /// Thread of the reactor. `None` before the start and after the end.
    reactor: Option<ReactorThread>,
    /// I/O threads, which end with the pool.
    pool: Pool,
    tracer: Arc<Tracer>,
}

impl Server {
    /// Starts to serve `config`, entirely or not at all. If `recoverable` is given, disks are
    /// opened so that the next process can recover them, and `recoverable` is called before any
    /// client is served. `ended` is called on the reactor thread when the reactor has ended.
    ///
    /// # Errors
    /// The first error, with the line of the configuration that it concerns.
    pub(super) fn start(
        config: &ServerConfig,
        recoverable: Option<impl FnOnce(&Self, &mut Reactor, &[PortId])>,
        ended: impl FnOnce() + Send + 'static,
    ) -> anyhow::Result<Self> {
        let configs = open(config, recoverable.is_some())?;
        let pool = Pool::start(&config.pool).context("cannot start the I/O threads")?;
        let events = EventQueue::new();
        let mut controllers = Vec::with_capacity(configs.len());
        let mut devices = Vec::with_capacity(configs.len());
        let served_configs = config.controllers.iter().zip(configs);
        for (index, (served, controller_config)) in served_configs.enumerate() {
            let carrier = carrier(served, &events.sender(index));
            let controller = Controller::new(controller_config, pool.clone(), carrier)?;
            assign_io_thread(served, &controller)?;
            let client = Arc::default();
            let handler = client_events(events.sender(index), &client);
            devices.push(ControllerDevice::new(controller.clone(), handler)?);
            controllers.push(ServedController::new(index, served.clone(), controller, client));
        }
        let guests = controllers.iter().map(|one| open_files::of_controller(one, pool.len()));
        let exports = open_files::OF_CLIENT * config.exports.len() as u64;
        let disks = open_files::OF_DISK * config.unattached().count() as u64;
        let clients = guests.sum::<u64>() + exports;
        descriptor_limit::check_room(open_files::OF_REQUESTS + disks + clients)?;
        let listeners = config.controllers.iter().map(bind_one).collect::<Result<Vec<_>, _>>()?;
        let mut server = Self::new(controllers, events, pool, recoverable.is_some());
        server.changes.exports().set_wanted(config.exports.clone());
        for disk in config.unattached() {
            let added = server.changes.put_disk(disk);
            match &disk.origin {
                Some(origin) => added.with_context(|| origin.clone())?,
                None => added?,
            };
        }
        server.trace(config, false)?;
        for served in server.controllers() {
            info!("{}", summary(&served));
        }
        let mut reactor = Reactor::new(Limits::default())?;
        let ports = listeners.into_iter().zip(devices);
        let ports = ports.map(|(listener, device)| reactor.add(listener, Box::new(device)));
        let ports = ports.collect::<io::Result<Vec<_>>>()?;
        server.controllers().iter().zip(&ports).for_each(|(served, port)| served.set_port(*port));
        if let Some(keep) = recoverable {
            keep(&server, &mut reactor, &ports);
        }
        server.serve(reactor, ended)?;
        Ok(server)
    }

    /// Creates a server that does not serve yet.
    pub(super) fn new(
        controllers: Vec<ServedController>,
        events: EventQueue,
        pool: Pool,
        recoverable: bool,
    ) -> Self {
        let controllers = Arc::new(Registry::new(controllers));
        let registry = Arc::clone(&controllers);
        let changes = Changes::new(pool.clone(), events.sender(0), recoverable, registry);
        let changes = Arc::new(changes);
        let tracer = Arc::new(Tracer::new(pool.clone()));
        Self { controllers, changes, events: Some(events), reactor: None, pool, tracer }
    }

    /// Starts the configured doorbell trace and latency measurement. If this process `is_next`
    /// after another one, the previous process's trace file is not overwritten.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(super) fn trace(&self, config: &ServerConfig, is_next: bool) -> anyhow::Result<()> {
        if config.measure {
            self.tracer.measure(true);
        }
        match &config.trace {
            Some((path, records)) => self.tracer.start_in(path, *records, is_next),
            None => Ok(()),
        }
    }

    pub(super) fn tracer(&self) -> &Arc<Tracer> {
        &self.tracer
    }

    /// Starts the reactor thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn serve(
        &mut self,
        reactor: Reactor,
        ended: impl FnOnce() + Send + 'static,
    ) -> anyhow::Result<()> {
        let thread = ReactorThread::start(reactor, ended)?;
        self.changes.serve(thread.handle());
        self.reactor = Some(thread);
        Ok(())
    }

    /// Pauses the reactor.
    ///
    /// # Errors
    /// A request of a client takes too long. The reactor then continues.
    pub(super) fn pause_reactor(&self, until: Instant) -> anyhow::Result<Reactor> {
        let reactor = self.reactor.as_ref().and_then(|thread| thread.pause(until));
        reactor.context("a request of a client took too long")
    }

    /// Disables the rate limits of all disks, so that the server quiesces without delay.
    pub(super) fn disable_limits(&self) {
        self.controllers().iter().for_each(|served| served.disable_limits());
    }

    /// Checks the liveness of the I/O threads, the control-plane thread and the reactor, one after
    /// the other. `ended` is called on the reactor thread after all of them have answered. It is
    /// never called if one of them hangs.
    pub(super) fn check_liveness(&self, ended: impl FnOnce() + Send + 'static) {
        let Some(handle) = self.reactor.as_ref().map(ReactorThread::handle) else { return };
        self.pool.check_liveness(move || handle.check_liveness(ended));
    }

    /// Returns all disks: those of controllers, and those that no controller has.
    pub(super) fn disks(&self) -> Vec<Arc<dyn Disk>> {
        let mut all: Vec<_> = self
            .controllers()
            .iter()
            .flat_map(|served| served.disks().collect::<Vec<_>>())
            .collect();
        let unattached = self.changes.unattached().lock();
        all.extend(unattached.values().map(|open| Arc::clone(&open.disk)));
        all
    }

    /// Releases the locks of all disks. After this, the process must not access the disks any more.
    pub(super) fn release_locks(&self) {
        self.disks().iter().for_each(|disk| disk.release_lock());
    }

    /// Controllers, in the order of the configuration.
    pub(super) fn controllers(&self) -> Vec<Arc<ServedController>> {
        self.controllers.all()
    }

    /// Registry of the controllers.
    pub(super) fn registry(&self) -> &Arc<Registry> {
        &self.controllers
    }

    /// Object that changes controllers, disks and exports at run time.
    pub(super) fn changes(&self) -> &Arc<Changes> {
        &self.changes
    }

    /// Number of I/O threads.
    pub(super) fn workers(&self) -> usize {
        self.pool.len()
    }

    /// Takes the event queue. `None` after the first call.
    pub(super) fn take_events(&mut self) -> Option<EventQueue> {
        self.events.take()
    }

    /// Disconnects all clients and removes the sockets. Afterwards no client's memory is
    /// accessed.
    ///
    /// # Errors
    /// The reactor had failed before.
    pub(super) fn stop(&mut self) -> anyhow::Result<()> {
        let Some(thread) = self.reactor.take() else { return Ok(()) };
        match thread.stop() {
            Ok(outcome) => outcome.context("the sockets are not served any more"),
            Err(_) => Err(anyhow!("the thread that serves the sockets has panicked")),
        }
    }

    /// Flushes all disks. Returns false if a flush failed.
    #[must_use]
    pub(super) fn flush(&self) -> bool {
        let mut all = true;
        for disk in self.disks() {
            if let Err(error) = flush(&*disk) {
                error!("cannot flush {}: {error}", disk.name());
                all = false;
            }
        }
        all
    }
}

/// Opens the disks of all controllers, without creating sockets.
fn open(server: &ServerConfig, recoverable: bool) -> anyhow::Result<Vec<Config>> {
    if let Some(why) = duplicate_disk(&server.controllers) {
        return Err(bad_input(anyhow!(why)));
    }
    let open = if recoverable { disk_open::open_recoverable } else { disk_open::open };
    server.controllers.iter().map(|served| open_one(served, open, |_| None)).collect()
}
