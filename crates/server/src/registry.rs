//! Registry of the served controllers.

use parking_lot::RwLock;
use shadowbell_config::server_config::SocketConfig;
use shadowbell_controller::Controller;
use shadowbell_disk::Disk;
use shadowbell_disk_layers::LimitedDisk;
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
            socket: asked.known_socket(),
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

/// Served controllers, in the order of their addition.
#[derive(Default)]
pub(super) struct Registry {
    controllers: RwLock<Vec<Arc<ServedController>>>,
    /// The controllers differ from the configuration.
    changed: AtomicBool,
}

impl Registry {
    pub(super) fn new(controllers: Vec<ServedController>) -> Self {
        let controllers = RwLock::new(controllers.into_iter().map(Arc::new).collect());
        Self { controllers, changed: AtomicBool::new(false) }
    }

    /// Current controllers.
    pub(super) fn all(&self) -> Vec<Arc<ServedController>> {
        self.controllers.read().clone()
    }

    /// Short status text.
    pub(super) fn summary(&self) -> String {
        let all = self.controllers.read();
        let clients = all.iter().filter(|served| served.has_client()).count();
        let count = all.len();
        format!("serves {count} controller{}, {clients} with a client", plural(count))
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
        self.set_changed();
        served
    }

    pub(super) fn remove(&self, id: &str) {
        self.controllers.write().retain(|served| served.id != id);
        self.set_changed();
    }

    pub(super) fn set_changed(&self) {
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Returns true if the controllers differ from the configuration.
    pub(super) fn is_changed(&self) -> bool {
        self.changed.load(Ordering::Relaxed)
    }
}
