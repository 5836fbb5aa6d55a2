//! Addition and removal of controllers while the server runs.
//!
//! One change runs at a time, on the thread that requests it, and none during an upgrade. The new
//! disks and sockets are opened before the old ones are removed, so a change that fails leaves the
//! server unchanged.

use super::builder::{
    assign_io_thread, bind_one, carrier, client_events, open_one, summary, with_origin,
};
use super::checkpointer::Checkpointer;
use super::event::EventSender;
use super::flush::flush;
use super::guard::{self, Loss};
use super::in_flight::InFlightDisks;
use super::open_disk::{OpenDisk, UnattachedDisks, check_group, id_of};
use super::registry::{Registry, ServedController};
use super::running_exports::Exports;
use super::sandbox;
use anyhow::{Context, anyhow};
use parking_lot::{Mutex, MutexGuard};
use shadowbell_config::controller_config::{ControllerConfig, nsids};
use shadowbell_config::disk_spec::DiskSpecError;
use shadowbell_config::server_config::{SocketConfig, duplicate_disk};
use shadowbell_controller::{Controller, Pool};
use shadowbell_disk::{Disk, OpenError};
use shadowbell_frontend::vfio_user::ControllerDevice;
use shadowbell_process::exit;
use shadowbell_storage::disk_open;
use shadowbell_vfio_user::Listener;
use shadowbell_vfio_user::server::Handle;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// Time limit for the disconnect of a client, and for the close of disks.
const GONE: Duration = Duration::from_secs(5);
/// Time for which an upgrade waits for the end of a running change. Guests wait meanwhile.
const PAUSE: Duration = Duration::from_millis(200);

/// Changes of controllers, namespaces, disks and exports at run time, and the state that they need.
pub(super) struct Changes {
    pool: Pool,
    events: EventSender,
    /// True if disks are opened so that the next process can recover them.
    recoverable: bool,
    registry: Arc<Registry>,
    /// Handle of the reactor, once it runs.
    handle: Mutex<Option<Handle>>,
    next: AtomicUsize,
    /// Lock that serializes changes.
    change_lock: Mutex<()>,
    /// Named disks that no controller has.
    unattached: UnattachedDisks,
    exports: Exports,
    /// Requests in flight at the disks, as of the last scan.
    in_flight: InFlightDisks,
    /// Checkpoint at the supervisor, if there is one.
    checkpoint: OnceLock<Arc<Checkpointer>>,
}

/// A controller that is ready to be served.
pub(super) struct Prepared {
    served: ServedController,
    device: ControllerDevice,
    listener: Listener,
}

impl Changes {
    pub(super) fn new(
        pool: Pool,
        events: EventSender,
        recoverable: bool,
        registry: Arc<Registry>,
    ) -> Self {
        let next = AtomicUsize::new(registry.all().len());
        let (handle, change_lock, unattached, exports, in_flight, checkpoint) = Default::default();
        Self {
            pool,
            events,
            recoverable,
            registry,
            handle,
            next,
            change_lock,
            unattached,
            exports,
            in_flight,
            checkpoint,
        }
    }

    /// Number of shared I/O threads.
    pub(super) fn workers(&self) -> usize {
        self.pool.len()
    }

    /// Sets the index that the next added controller gets.
    pub(super) fn number_from(&self, next: usize) {
        self.next.store(next, Ordering::Relaxed);
    }

    /// Handle of the reactor, if it runs.
    pub(super) fn handle(&self) -> Option<Handle> {
        self.handle.lock().clone()
    }

    /// Sets the reactor that serves the sockets.
    pub(super) fn serve(&self, handle: Handle) {
        *self.handle.lock() = Some(handle);
    }

    /// Sets the checkpoint that is updated with each change.
    pub(super) fn set_checkpoint(&self, checkpoint: Arc<Checkpointer>) {
        let _ = self.checkpoint.set(checkpoint);
    }

    /// Blocks changes until the result is dropped. `None` if a change in progress takes too long.
    pub(super) fn pause(&self) -> Option<MutexGuard<'_, ()>> {
        self.change_lock.try_lock_for(PAUSE)
    }

    /// Adds a controller. Returns false if it is served already.
    ///
    /// # Errors
    /// The controller cannot be served, or its id belongs to a different controller.
    pub(super) fn add(&self, requested: SocketConfig) -> anyhow::Result<bool> {
        let _guard = self.change_lock.lock();
        self.registry.check_waiting(Some(&requested.id()))?;
        for disk in &requested.controller.disks {
            check_group(&disk.disk)?;
        }
        if let Some(served) = self.registry.find(&requested.id()) {
            return match served.requested().is_same(&requested) {
                true => Ok(false),
                false => Err(exit::conflict(anyhow!(
                    "a controller `{}` exists already, with other properties; remove it first",
                    served.id
                ))),
            };
        }
        self.commit(self.prepare(requested)?)?;
        Ok(true)
    }

    /// Removes a controller. `forced` is required if the controller has a client.
    ///
    /// # Errors
    /// The controller does not exist, or has a client and `forced` is false.
    pub(super) fn remove(&self, id: &str, forced: bool) -> anyhow::Result<()> {
        let _guard = self.change_lock.lock();
        let served = self.find(id)?;
        let loss = Loss::of_controller(&served, "would lose the controller".to_owned());
        let losses: Vec<_> = loss.into_iter().chain(self.export_losses(&served)).collect();
        guard::check(&losses, forced)?;
        self.take_away(served)
    }

    /// Ids of the exports that end with a controller: those of its disks without a configured id.
    fn exports_with(&self, served: &ServedController) -> Vec<String> {
        let requested = served.requested();
        let disks = nsids(&requested.controller.disks).zip(&requested.controller.disks);
        let own = disks.filter(|(_, disk)| disk.id.is_none());
        own.flat_map(|(nsid, disk)| self.exports.of(&id_of(&served.id, nsid, disk))).collect()
    }

    /// Losses of the clients of exports that end with a controller.
    pub(super) fn export_losses(&self, served: &ServedController) -> Vec<Loss> {
        let exports = self.exports_with(served);
        exports.iter().filter_map(|export| self.exports.loss(export)).collect()
    }

    /// Takes the lock of changes, for a change that consists of several.
    pub(super) fn change_lock(&self) -> MutexGuard<'_, ()> {
        self.change_lock.lock()
    }

    /// Named disks that no controller has.
    pub(super) fn unattached(&self) -> &UnattachedDisks {
        &self.unattached
    }

    /// Exports of disks.
    pub(super) fn exports(&self) -> &Exports {
        &self.exports
    }

    /// Requests in flight at the disks, as of the last scan.
    pub(super) fn in_flight(&self) -> &InFlightDisks {
        &self.in_flight
    }

    /// I/O threads.
    pub(super) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Controllers that are served.
    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Finds a controller by the id or socket path that a request names.
    ///
    /// # Errors
    /// The controller does not exist.
    pub(super) fn find(&self, id: &str) -> anyhow::Result<Arc<ServedController>> {
        self.registry.check_waiting(Some(id))?;
        self.registry.find_by_any(id).ok_or_else(|| {
            exit::not_found(anyhow!(
                "there is no controller `{id}`; `shadowbell ctl controllers` lists them"
            ))
        })
    }

    /// Checkpoint at the supervisor, if there is one.
    pub(super) fn checkpoint(&self) -> Option<&Arc<Checkpointer>> {
        self.checkpoint.get()
    }

    /// Opens a disk. If the server has a supervisor, the disk can be recovered by the next process.
    ///
    /// # Errors
    /// The disk cannot be opened, or is not recovered yet.
    pub(super) fn open(&self, spec: &str) -> Result<Arc<dyn Disk>, DiskSpecError> {
        self.registry.check_waiting_source(spec).map_err(DiskSpecError::Other)?;
        let open = if self.recoverable { disk_open::open_recoverable } else { disk_open::open };
        let disk = open(spec).map_err(|error| match error {
            DiskSpecError::Disk(OpenError::Busy { .. }) => self.own_disk(spec).unwrap_or(error),
            error => error,
        })?;
        self.check_orphans(&disk).map_err(DiskSpecError::Other)?;
        Ok(disk)
    }

    /// Opens everything that a controller needs, without serving it.
    ///
    /// # Errors
    /// The controller cannot be served.
    pub(super) fn prepare(&self, mut requested: SocketConfig) -> anyhow::Result<Prepared> {
        let ControllerConfig { disks, subsystem, .. } = &mut requested.controller;
        self.resolve(disks, subsystem.as_ref())?;
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let events = self.events.of(index);
        if let Some(why) = duplicate_disk(std::slice::from_ref(&requested)) {
            return Err(exit::bad_input(anyhow!(why)));
        }
        let config = open_one(
            &requested,
            |spec| self.open(spec),
            |id| self.unattached_disk(id, requested.controller.read_only),
        )?;
        for (wanted, namespace) in requested.controller.disks.iter().zip(&config.namespaces) {
            let id = wanted.id.as_ref();
            if !id.is_some_and(|id| self.unattached.lock().contains_key(id)) {
                self.check_orphans(&namespace.disk)?;
            }
        }
        let controller = Controller::new(config, self.pool.clone(), carrier(&requested, &events));
        let controller = with_origin(&requested, controller.map_err(exit::bad_input))?;
        with_origin(
            &requested,
            assign_io_thread(&requested, &controller).map_err(exit::bad_input),
        )?;
        let client = Arc::default();
        let handler = client_events(events, &client);
        let device = ControllerDevice::new(controller.clone(), handler)?;
        let listener = bind_one(&requested).map_err(sandbox::explain)?;
        let served = ServedController::new(index, requested, controller, client);
        self.check_files_of_controller(&served)?;
        Ok(Prepared { served, device, listener })
    }

    /// Begins to serve a prepared controller.
    ///
    /// # Errors
    /// The server does not serve yet.
    pub(super) fn commit(&self, prepared: Prepared) -> anyhow::Result<()> {
        let Prepared { served, device, listener } = prepared;
        let handle = self.handle.lock().clone().context("the server does not serve yet")?;
        let checkpoint = self.checkpoint.get().filter(|checkpoint| checkpoint.add(&served));
        let served = self.registry.add(served);
        info!("{}", summary(&served));
        let device = Box::new(device);
        let port = match checkpoint {
            Some(checkpoint) => {
                handle.add_recorded(listener, device, checkpoint.port_recorder(served.index))
            }
            None => handle.add(listener, device),
        };
        served.set_port(port);
        for disk in &served.requested().controller.disks {
            self.end_attach(disk.id.as_deref());
        }
        Ok(())
    }

    /// Ends a controller. Returns when its disks are closed, or after a time limit.
    ///
    /// # Errors
    /// The server does not serve yet.
    pub(super) fn take_away(&self, served: Arc<ServedController>) -> anyhow::Result<()> {
        let handle = self.handle.lock().clone().context("the server does not serve yet")?;
        // A disk without a configured id is closed with its controller, so its exports are removed.
        // A FUSE file in use is an error before the first one is removed.
        let exports = self.exports_with(&served);
        exports.iter().try_for_each(|export| self.check_unused(export))?;
        for export in exports {
            warn!("export {export}: removed with its disk of {}", served.name);
            self.drop_export(&export)?;
        }
        let index = served.index;
        let requested = served.requested();
        let namespaces = served.controller.namespaces();
        // The disks of a subsystem stay attached to its other controllers.
        let is_shared = |disk: &Arc<dyn Disk>| {
            let all = self.registry.all();
            let mut others = all.iter().filter(|other| !Arc::ptr_eq(other, &served));
            others.any(|other| other.disks().any(|its| Arc::ptr_eq(&its, disk)))
        };
        let named = requested.controller.disks.iter().zip(&namespaces);
        let named = named.filter(|(_, (_, own))| !is_shared(&own.disk));
        let named = named.filter_map(|(config, (_, own))| self.begin_detach(config, &own.disk));
        let named: Vec<_> = named.collect();
        let checkpoint =
            self.checkpoint.get().map(|checkpoint| (checkpoint, checkpoint.disks(index)));
        if let Some((checkpoint, _)) = &checkpoint {
            checkpoint.begin_removal(index);
        }
        if let Some(port) = served.port() {
            // The channel is closed without a message if the reactor has ended.
            let _ = handle.remove(port).recv_timeout(GONE);
        }
        self.registry.remove(&served.id);
        let name = served.name.clone();
        let mut disks: Vec<Weak<dyn Disk>> = Vec::new();
        for ((nsid, namespace), config) in namespaces.iter().zip(&requested.controller.disks) {
            let disk = &namespace.disk;
            // A disk without an id is closed, unless its storage does not answer.
            if config.id.is_none() && !is_shared(disk) {
                let open = OpenDisk { spec: config.disk.clone(), disk: Arc::clone(disk) };
                if self.close_disk(&id_of(&served.id, *nsid, config), open).is_err() {
                    continue;
                }
            } else if let Err(error) = flush(&**disk) {
                warn!("{name}: cannot flush {}: {error}", disk.name());
            }
            // Disks of a subsystem are shared with other controllers, so their close is not
            // awaited.
            if requested.controller.subsystem.is_none() && config.id.is_none() {
                disks.push(Arc::downgrade(disk));
            }
        }
        drop((served, namespaces));
        named.into_iter().for_each(|disk| self.end_detach(Some(disk), true));
        // I/O threads drop a disk when they handle the removal. Statistics may hold it briefly.
        let until = Instant::now() + GONE;
        while disks.iter().any(|disk| disk.strong_count() != 0) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some((checkpoint, disks)) = checkpoint {
            checkpoint.end_removal(index, &disks);
        }
        info!("{name}: removed");
        Ok(())
    }
}
