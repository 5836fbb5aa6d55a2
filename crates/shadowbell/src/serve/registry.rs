//! The controllers that are served, for all who look at them.

use super::server_config::SocketConfig;
use parking_lot::RwLock;
use shadowbell_backend::Disk;
use shadowbell_controller::Controller;
use shadowbell_vfio_user::server::PortId;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A controller that is served.
pub(super) struct ServedController {
    /// Its number, which no other one gets.
    pub(super) index: usize,
    /// What it is, as somebody would ask for it.
    asked: RwLock<Arc<SocketConfig>>,
    /// What the reactor calls it.
    port: OnceLock<PortId>,
    /// Its socket, as it was written.
    pub(super) name: String,
    /// What requests call it.
    pub(super) id: String,
    /// Its socket, from the root.
    pub(super) socket: String,
    pub(super) controller: Controller,
    /// Whether a client is connected.
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

    /// Its disks, in the order of their namespaces.
    pub(super) fn disks(&self) -> impl Iterator<Item = Arc<dyn Disk>> {
        self.controller.namespaces().into_iter().map(|(_, namespace)| namespace.disk)
    }

    /// Whether requests wait until the limits of its disks allow them.
    pub(super) fn wait_for_limits(&self, is_so: bool) {
        for disk in self.disks() {
            disk.limiters().iter().for_each(|limiter| limiter.open(!is_so));
        }
    }

    /// What it is, as somebody would ask for it.
    pub(super) fn asked(&self) -> Arc<SocketConfig> {
        Arc::clone(&self.asked.read())
    }

    /// It has changed.
    pub(super) fn set_asked(&self, asked: SocketConfig) {
        *self.asked.write() = Arc::new(asked);
    }

    /// It is served.
    pub(super) fn set_port(&self, port: PortId) {
        let _ = self.port.set(port);
    }

    /// What the reactor calls it.
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

/// All of them, in the order in which they came.
#[derive(Default)]
pub(super) struct Registry {
    controllers: RwLock<Vec<Arc<ServedController>>>,
    /// They are not those of the configuration any more.
    changed: AtomicBool,
}

impl Registry {
    pub(super) fn new(controllers: Vec<ServedController>) -> Self {
        let controllers = RwLock::new(controllers.into_iter().map(Arc::new).collect());
        Self { controllers, changed: AtomicBool::new(false) }
    }

    /// As of now.
    pub(super) fn all(&self) -> Vec<Arc<ServedController>> {
        self.controllers.read().clone()
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.controllers.read().len()
    }

    /// What is served, in a few words.
    pub(super) fn summary(&self) -> String {
        let all = self.controllers.read();
        let clients = all.iter().filter(|served| served.has_client()).count();
        let count = all.len();
        format!("serves {count} controller{}, {clients} to a client", plural(count))
    }

    /// The one that requests call so.
    pub(super) fn find(&self, id: &str) -> Option<Arc<ServedController>> {
        self.controllers.read().iter().find(|served| served.id == id).cloned()
    }

    /// The same; or the one at the socket of this path from the root.
    pub(super) fn find_by_any(&self, id: &str) -> Option<Arc<ServedController>> {
        let at_socket = || {
            let all = self.controllers.read();
            all.iter().find(|served| served.socket == id).cloned()
        };
        self.find(id).or_else(at_socket)
    }

    /// The one of this number.
    pub(super) fn numbered(&self, index: usize) -> Option<Arc<ServedController>> {
        self.controllers.read().iter().find(|served| served.index == index).cloned()
    }

    pub(super) fn add(&self, served: ServedController) -> Arc<ServedController> {
        let served = Arc::new(served);
        self.controllers.write().push(Arc::clone(&served));
        self.set_changed();
        served
    }

    /// One comes from another process, which has served it by the same number.
    pub(super) fn join(&self, served: Arc<ServedController>) {
        let mut all = self.controllers.write();
        let place = all.partition_point(|other| other.index < served.index);
        all.insert(place, served);
    }

    pub(super) fn remove(&self, id: &str) {
        self.controllers.write().retain(|served| served.id != id);
        self.set_changed();
    }

    pub(super) fn set_changed(&self) {
        self.changed.store(true, Ordering::Relaxed);
    }

    /// Whether one has come or gone since the configuration was read.
    pub(super) fn is_changed(&self) -> bool {
        self.changed.load(Ordering::Relaxed)
    }
}
