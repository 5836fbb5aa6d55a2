//! Registry of the served controllers.

use anyhow::anyhow;
use parking_lot::RwLock;
use shadowbell_config::server_config::SocketConfig;
use shadowbell_controller::Controller;
use shadowbell_disk::Disk;
use shadowbell_disk_layers::LimitedDisk;
use shadowbell_process::exit;
use shadowbell_vfio_user::server::PortId;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A served controller.
pub(super) struct ServedController {
    /// Index, which is never reused.
    pub(super) index: usize,
    /// Current configuration.
    asked: RwLock<Arc<SocketConfig>>,
    /// Id of its socket in the reactor.
    port: OnceLock<PortId>,
    /// Path of its socket as configured, for messages.
    pub(super) name: String,
    /// Id in requests.
    pub(super) id: String,
    /// Absolute path of its socket.
    pub(super) socket: String,
    pub(super) controller: Controller,
    /// True while a client is connected.
    pub(super) client: Arc<AtomicBool>,
}

impl ServedController {
    pub(super) fn new(
        index: usize,
        asked: SocketConfig,
        controller: Controller,
        client: Arc<AtomicBool>,
    ) -> Self {
        Self {
            index,
            name: asked.socket.display().to_string(),
            id: asked.id(),
            socket: asked.canonical_socket(),
            asked: RwLock::new(Arc::new(asked)),
            port: OnceLock::new(),
            controller,
            client,
        }
    }

    /// Disks in the order of the namespaces.
    pub(super) fn disks(&self) -> impl Iterator<Item = Arc<dyn Disk>> {
        self.controller.namespaces().into_iter().map(|(_, namespace)| namespace.disk)
    }

    /// Disables the rate limits of its disks, so that waiting requests proceed.
    pub(super) fn disable_limits(&self) {
        for disk in self.disks() {
            let limiters = LimitedDisk::of(&*disk).map_or(&[][..], LimitedDisk::limiters);
            limiters.iter().for_each(|limiter| limiter.open(true));
        }
    }

    /// Current configuration.
    pub(super) fn asked(&self) -> Arc<SocketConfig> {
        Arc::clone(&self.asked.read())
    }

    /// Replaces the configuration.
    pub(super) fn set_asked(&self, asked: SocketConfig) {
        *self.asked.write() = Arc::new(asked);
    }

    /// Sets the id of its socket in the reactor.
    pub(super) fn set_port(&self, port: PortId) {
        let _ = self.port.set(port);
    }

    /// Id of its socket in the reactor.
    pub(super) fn port(&self) -> Option<PortId> {
        self.port.get().copied()
    }

    pub(super) fn has_client(&self) -> bool {
        self.client.load(Ordering::Relaxed)
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}

/// A controller of a dead process that waits for its disks.
#[derive(Clone)]
pub(super) struct WaitingController {
    pub(super) index: usize,
    pub(super) asked: SocketConfig,
    /// Reason for the wait.
    pub(super) why: String,
}

/// Served controllers, in the order of their indices.
#[derive(Default)]
pub(super) struct Registry {
    controllers: RwLock<Vec<Arc<ServedController>>>,
    /// Controllers that are not recovered yet.
    waiting: RwLock<Vec<WaitingController>>,
}

impl Registry {
    pub(super) fn new(controllers: Vec<ServedController>) -> Self {
        let controllers = RwLock::new(controllers.into_iter().map(Arc::new).collect());
        Self { controllers, ..Self::default() }
    }

    /// Current controllers.
    pub(super) fn all(&self) -> Vec<Arc<ServedController>> {
        self.controllers.read().clone()
    }

    /// Short status text.
    pub(super) fn summary(&self) -> String {
        let all = self.controllers.read();
        let clients = all.iter().filter(|served| served.has_client()).count();
        let (count, waiting) = (all.len(), self.waiting.read().len());
        let mut text =
            format!("serves {count} controller{}, {clients} with a client", plural(count));
        if waiting > 0 {
            text += &format!("; {waiting} wait for their disks");
        }
        text
    }

    /// Registers the controllers that wait for their disks, each with its new index.
    pub(super) fn begin_waiting<'a>(&self, all: impl Iterator<Item = (usize, &'a SocketConfig)>) {
        let mut waiting: Vec<_> = all
            .map(|(index, asked)| WaitingController {
                index,
                asked: asked.clone(),
                why: "its disks are being opened".to_owned(),
            })
            .collect();
        waiting.sort_by_key(|one| one.index);
        *self.waiting.write() = waiting;
    }

    /// Sets the reason why a controller waits.
    pub(super) fn waits_for(&self, index: usize, why: &str) {
        let mut waiting = self.waiting.write();
        if let Some(one) = waiting.iter_mut().find(|one| one.index == index) {
            why.clone_into(&mut one.why);
        }
    }

    /// Controllers that wait.
    pub(super) fn waiting(&self) -> Vec<WaitingController> {
        self.waiting.read().clone()
    }

    /// Returns an error if a controller waits that has this id or this socket, or any if `None`.
    ///
    /// # Errors
    /// The controller waits.
    pub(super) fn check_waiting(&self, id: Option<&str>) -> anyhow::Result<()> {
        let waiting = self.waiting.read();
        let is_it = |one: &&WaitingController| {
            id.is_none_or(|id| one.asked.id() == id || one.asked.canonical_socket() == id)
        };
        match waiting.iter().find(is_it) {
            None => Ok(()),
            Some(one) => Err(exit::conflict(anyhow!(
                "the controller {} waits for its disks ({}); try again when it is served",
                one.asked.id(),
                one.why
            ))),
        }
    }

    /// Adds a controller that was recovered.
    pub(super) fn recovered(&self, served: Arc<ServedController>) {
        self.waiting.write().retain(|one| one.index != served.index);
        let mut all = self.controllers.write();
        let at = all.partition_point(|other| other.index < served.index);
        all.insert(at, served);
    }

    /// Finds a controller by its id.
    pub(super) fn find(&self, id: &str) -> Option<Arc<ServedController>> {
        self.controllers.read().iter().find(|served| served.id == id).cloned()
    }

    /// Finds a controller by its id or by the absolute path of its socket.
    pub(super) fn find_by_any(&self, id: &str) -> Option<Arc<ServedController>> {
        let at_socket = || {
            let all = self.controllers.read();
            all.iter().find(|served| served.socket == id).cloned()
        };
        self.find(id).or_else(at_socket)
    }

    /// Finds a controller by its index.
    pub(super) fn numbered(&self, index: usize) -> Option<Arc<ServedController>> {
        self.controllers.read().iter().find(|served| served.index == index).cloned()
    }

    pub(super) fn add(&self, served: ServedController) -> Arc<ServedController> {
        let served = Arc::new(served);
        self.controllers.write().push(Arc::clone(&served));
        served
    }

    pub(super) fn remove(&self, id: &str) {
        self.controllers.write().retain(|served| served.id != id);
    }
}
