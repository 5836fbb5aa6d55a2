//! Controllers that come and go while the server runs.
//!
//! One change is made at a time, on whatever thread asks for it, and none while another process may
//! take over. What is needed is opened before anything is taken away, so a change that is not
//! possible leaves everything as it was.

use super::event::EventSender;
use super::flush::flush;
use super::keeping::Kept;
use super::making::{bind_one, carrier, client_events, open_one, place, summary, with_origin};
use super::registry::{Registry, ServedController};
use super::sandbox;
use super::server_config::{SocketConfig, disk_asked_for_twice};
use crate::disk_spec::{self, DiskSpecError};
use crate::exit;
use anyhow::{Context, anyhow};
use parking_lot::{Mutex, MutexGuard};
use shadowbell_backend::Disk;
use shadowbell_controller::{Controller, Pool};
use shadowbell_frontend::vfio_user::ControllerDevice;
use shadowbell_vfio_user::Listener;
use shadowbell_vfio_user::server::Handle;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// How long a client may take to be let go of, and disks to be closed.
const GONE: Duration = Duration::from_secs(5);

/// Adds controllers and takes them away.
pub(super) struct Changes {
    pool: Pool,
    events: EventSender,
    /// Whether disks are opened so that they can be handed over.
    lasting: bool,
    registry: Arc<Registry>,
    /// The reactor's, once it serves.
    handle: Mutex<Option<Handle>>,
    next: AtomicUsize,
    /// Whose turn it is.
    turn: Mutex<()>,
    /// What a keeper holds of it.
    kept: OnceLock<Arc<Kept>>,
}

/// A controller that could be served.
pub(super) struct Prepared {
    served: ServedController,
    device: ControllerDevice,
    listener: Listener,
}

impl Changes {
    pub(super) fn new(
        pool: Pool,
        events: EventSender,
        lasting: bool,
        registry: Arc<Registry>,
    ) -> Self {
        let next = AtomicUsize::new(registry.all().len());
        let (handle, turn, kept) = Default::default();
        Self { pool, events, lasting, registry, handle, next, turn, kept }
    }

    /// The sockets are served from here on.
    pub(super) fn serve(&self, handle: Handle) {
        *self.handle.lock() = Some(handle);
    }

    /// So many controllers come from another process: who comes later gets another number.
    pub(super) fn expect(&self, count: usize) {
        self.next.store(count, Ordering::Relaxed);
    }

    /// A keeper holds what is served, and is told of changes.
    pub(super) fn keep_with(&self, kept: Arc<Kept>) {
        let _ = self.kept.set(kept);
    }

    /// Nothing changes as long as what this returns is there. `None`: a change takes too long.
    pub(super) fn pause(&self) -> Option<MutexGuard<'_, ()>> {
        self.turn.try_lock_for(Duration::from_secs(1))
    }

    /// Serves another controller. Whether it was not there yet.
    ///
    /// # Errors
    /// It can not be served; or one of its id is there, and is another.
    pub(super) fn add(&self, asked: SocketConfig) -> anyhow::Result<bool> {
        let _turn = self.turn.lock();
        if let Some(served) = self.registry.find(&asked.id()) {
            return match served.asked().is_same(&asked) {
                true => Ok(false),
                false => Err(exit::conflict(anyhow!(
                    "there is a controller `{}` already, and it is not what is asked for; remove \
                     it first",
                    served.id
                ))),
            };
        }
        self.commit(self.prepare(asked)?)?;
        Ok(true)
    }

    /// Serves a controller no more. One that has a client only if that is `forced`.
    ///
    /// # Errors
    /// It is not there, or has a client.
    pub(super) fn remove(&self, id: &str, forced: bool) -> anyhow::Result<()> {
        let _turn = self.turn.lock();
        let served = self.find(id)?;
        if served.has_client() && !forced {
            return Err(exit::conflict(anyhow!(
                "{} has a client, which would lose its disks; end it first, or force this",
                served.name
            )));
        }
        self.take_away(served)
    }

    /// Whose turn it is, for changes that are made of several.
    pub(super) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock()
    }

    /// What is served.
    pub(super) fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The controller that requests call so.
    ///
    /// # Errors
    /// There is none.
    pub(super) fn find(&self, id: &str) -> anyhow::Result<Arc<ServedController>> {
        self.registry.find_by_any(id).ok_or_else(|| {
            exit::not_there(anyhow!(
                "there is no controller `{id}`; `shadowbell ctl controllers` lists them"
            ))
        })
    }

    /// What a keeper holds, if there is one.
    pub(super) fn kept(&self) -> Option<&Arc<Kept>> {
        self.kept.get()
    }

    /// How a disk is opened here.
    ///
    /// # Errors
    /// It can not be.
    pub(super) fn open(&self, spec: &str) -> Result<Arc<dyn Disk>, DiskSpecError> {
        if self.lasting { disk_spec::open_lasting(spec) } else { disk_spec::open(spec) }
    }

    /// What is served is not what the configuration says any more.
    pub(super) fn set_changed(&self) {
        self.registry.set_changed();
    }

    /// Opens all that a controller needs, and serves nothing yet.
    ///
    /// # Errors
    /// It can not be served.
    pub(super) fn prepare(&self, asked: SocketConfig) -> anyhow::Result<Prepared> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        let events = self.events.of(index);
        if let Some(why) = disk_asked_for_twice(std::slice::from_ref(&asked)) {
            return Err(exit::bad_input(anyhow!(why)));
        }
        let config = open_one(&asked, self.lasting)?;
        let controller = Controller::new(config, self.pool.clone(), carrier(&asked, &events));
        let controller = with_origin(&asked, controller.map_err(exit::bad_input))?;
        with_origin(&asked, place(&asked, &controller).map_err(exit::bad_input))?;
        let client = Arc::default();
        let handler = client_events(events, &client);
        let device = ControllerDevice::new(controller.clone(), handler)?;
        let listener = bind_one(&asked).map_err(sandbox::explain)?;
        let served = ServedController::new(index, asked, controller, client);
        Ok(Prepared { served, device, listener })
    }

    /// Serves a controller.
    ///
    /// # Errors
    /// The server itself does not serve yet.
    pub(super) fn commit(&self, prepared: Prepared) -> anyhow::Result<()> {
        let Prepared { served, device, listener } = prepared;
        let handle = self.handle.lock().clone().context("the server does not serve yet")?;
        let kept = self.kept.get().filter(|kept| kept.add(&served));
        let served = self.registry.add(served);
        info!("{}", summary(&served));
        let device = Box::new(device);
        let port = match kept {
            Some(kept) => handle.add_recorded(listener, device, kept.port_recorder(served.index)),
            None => handle.add(listener, device),
        };
        served.set_port(port);
        Ok(())
    }

    /// Ends a controller. Returns when its disks are free, or after a while.
    ///
    /// # Errors
    /// The server itself does not serve yet.
    pub(super) fn take_away(&self, served: Arc<ServedController>) -> anyhow::Result<()> {
        let handle = self.handle.lock().clone().context("the server does not serve yet")?;
        let index = served.index;
        let kept = self.kept.get().map(|kept| (kept, kept.disks(index)));
        if let Some((kept, _)) = &kept {
            kept.will_remove(index);
        }
        if let Some(port) = served.port() {
            // It is told, or the reactor has ended.
            let _ = handle.remove(port).recv_timeout(GONE);
        }
        self.registry.remove(&served.id);
        let name = served.name.clone();
        let mut disks: Vec<Weak<dyn Disk>> = Vec::new();
        for (_, namespace) in &served.controller.namespaces() {
            if let Err(error) = flush(&*namespace.disk) {
                warn!("{name}: {} can not be flushed: {error}", namespace.disk.name());
            }
            // Others may have it.
            if served.asked().controller.subsystem.is_none() {
                disks.push(Arc::downgrade(&namespace.disk));
            }
        }
        drop(served);
        // Workers let go of it when they come to that, and whoever looks at it has it for a moment.
        let until = Instant::now() + GONE;
        while disks.iter().any(|disk| disk.strong_count() != 0) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some((kept, disks)) = kept {
            kept.removed(index, &disks);
        }
        info!("{name}: is served no more");
        Ok(())
    }
}
