//! Registry of the served controllers.

use anyhow::anyhow;
use parking_lot::RwLock;
use shadowbell_config::server_config::SocketConfig;
use shadowbell_config::uuid_text::uuid_text;
use shadowbell_controller::{Controller, NamespaceConfig};
use shadowbell_disk::Disk;
use shadowbell_disk_layers::LimitedDisk;
use shadowbell_process::exit;
use shadowbell_vfio_user::server::PortId;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// A served controller.
pub(super) struct ServedController {
    /// Index of the controller, which is never reused.
    pub(super) index: usize,
    /// Current configuration of the controller.
    requested: RwLock<Arc<SocketConfig>>,
    /// Id of the controller's socket in the reactor.
    port: OnceLock<PortId>,
    /// Configured path of the controller's socket, for messages.
    pub(super) name: String,
    /// Id of the controller in requests.
    pub(super) id: String,
    /// Absolute path of the controller's socket.
    pub(super) socket: String,
    pub(super) controller: Controller,
    /// True while a client is connected.
    pub(super) client: Arc<AtomicBool>,
}

impl ServedController {
    pub(super) fn new(
        index: usize,
        requested: SocketConfig,
        controller: Controller,
        client: Arc<AtomicBool>,
    ) -> Self {
        Self {
            index,
            name: requested.socket.display().to_string(),
            id: requested.id(),
            socket: requested.canonical_socket(),
            requested: RwLock::new(Arc::new(requested)),
            port: OnceLock::new(),
            controller,
            client,
        }
    }

    /// Disks in the order of the namespaces.
    pub(super) fn disks(&self) -> impl Iterator<Item = Arc<dyn Disk>> {
        self.controller.namespaces().into_iter().map(|(_, namespace)| namespace.disk)
    }

    /// Disables the rate limits of the controller's disks, so that waiting requests proceed.
    pub(super) fn disable_limits(&self) {
        for disk in self.disks() {
            let limiters = LimitedDisk::of(&*disk).map_or(&[][..], LimitedDisk::limiters);
            limiters.iter().for_each(|limiter| limiter.open(true));
        }
    }

    /// Current configuration of the controller.
    pub(super) fn requested(&self) -> Arc<SocketConfig> {
        Arc::clone(&self.requested.read())
    }

    /// Replaces the configuration.
    pub(super) fn set_requested(&self, requested: SocketConfig) {
        *self.requested.write() = Arc::new(requested);
    }

    /// Sets the id of the controller's socket in the reactor.
    pub(super) fn set_port(&self, port: PortId) {
        let _ = self.port.set(port);
    }

    /// Id of the controller's socket in the reactor.
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
    pub(super) requested: SocketConfig,
    /// Reason for the wait.
    pub(super) why: String,
}

/// Namespace of a controller, for the comparison of UUIDs with other namespaces.
struct Identified {
    /// Name of the controller.
    controller: String,
    nsid: u32,
    config: NamespaceConfig,
}

impl Identified {
    fn all_of(served: &ServedController) -> impl Iterator<Item = Self> {
        let controller = served.name.clone();
        let all = served.controller.namespaces().into_iter();
        all.map(move |(nsid, config)| Self { controller: controller.clone(), nsid, config })
    }

    /// Returns a warning if the other namespace has the same UUID, but another disk.
    fn conflict(&self, other: &Self) -> Option<String> {
        let (here, there) = (storage_of(&self.config.disk), storage_of(&other.config.disk));
        // The names of `mem:` and `null:` disks do not identify them.
        let is_named = !here.name().starts_with("mem:") && !here.name().starts_with("null:");
        let is_same = Arc::ptr_eq(here, there) || is_named && here.name() == there.name();
        (self.config.uuid == other.config.uuid && !is_same).then(|| {
            format!(
                "{} (namespace {} of {}) and {} (namespace {} of {}) are different disks with the \
                 UUID {}: a host that uses both takes them for two paths to one disk, and damages \
                 the data; give one of them another `uuid`",
                other.config.disk.name(),
                other.nsid,
                other.controller,
                self.config.disk.name(),
                self.nsid,
                self.controller,
                uuid_text(&self.config.uuid)
            )
        })
    }
}

/// Returns the disk below all layers.
fn storage_of(disk: &Arc<dyn Disk>) -> &Arc<dyn Disk> {
    let mut storage = disk;
    while let Some(inner) = storage.inner() {
        storage = inner;
    }
    storage
}

/// Served controllers, in the order of their indices.
#[derive(Default)]
pub(super) struct Registry {
    controllers: RwLock<Vec<Arc<ServedController>>>,
    /// Controllers of a dead process that are not recovered yet.
    waiting: RwLock<Vec<WaitingController>>,
}

impl Registry {
    pub(super) fn new(controllers: Vec<ServedController>) -> Self {
        let controllers: Vec<_> = controllers.into_iter().map(Arc::new).collect();
        let registry = Self { controllers: RwLock::new(controllers), ..Self::default() };
        registry.all().iter().for_each(|served| registry.warn_of_equal_uuids(served, None));
        registry
    }

    /// Logs a warning for each namespace of `served`, or only for `nsid`, that has the UUID of
    /// another disk.
    pub(super) fn warn_of_equal_uuids(&self, served: &ServedController, nsid: Option<u32>) {
        let others = self.all();
        for own in Identified::all_of(served).filter(|own| nsid.is_none_or(|nsid| nsid == own.nsid))
        {
            let conflict = others
                .iter()
                .take_while(|other| nsid.is_some() || other.index <= served.index)
                .flat_map(|other| Identified::all_of(other))
                .find_map(|other| own.conflict(&other));
            if let Some(conflict) = conflict {
                tracing::warn!("{conflict}");
            }
        }
    }

    /// Current controllers.
    pub(super) fn all(&self) -> Vec<Arc<ServedController>> {
        self.controllers.read().clone()
    }

    /// Short status text for the service manager.
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
            .map(|(index, requested)| WaitingController {
                index,
                requested: requested.clone(),
                why: "they are being opened".to_owned(),
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

    /// Controllers that wait for their disks.
    pub(super) fn waiting(&self) -> Vec<WaitingController> {
        self.waiting.read().clone()
    }

    /// Returns an error if the controller with this id or socket path waits for its disks; for
    /// `None`, if any controller waits.
    ///
    /// # Errors
    /// The controller waits.
    pub(super) fn check_waiting(&self, id: Option<&str>) -> anyhow::Result<()> {
        let waiting = self.waiting.read();
        let is_it = |one: &&WaitingController| {
            id.is_none_or(|id| one.requested.id() == id || one.requested.canonical_socket() == id)
        };
        match waiting.iter().find(is_it) {
            None => Ok(()),
            Some(one) => Err(exit::conflict(anyhow!(
                "the controller {} waits for its disks ({}); try again when it is served",
                one.requested.id(),
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
        self.warn_of_equal_uuids(&served, None);
        served
    }

    pub(super) fn remove(&self, id: &str) {
        self.controllers.write().retain(|served| served.id != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_disk_file::{MemDisk, NullDisk};

    /// Returns a namespace whose UUID has the byte `uuid` 16 times.
    fn namespace(controller: &str, uuid: u8, disk: &Arc<dyn Disk>) -> Identified {
        let config = NamespaceConfig { disk: Arc::clone(disk), uuid: [uuid; 16] };
        Identified { controller: controller.to_owned(), nsid: 1, config }
    }

    #[test]
    fn different_disks_with_one_uuid_are_named() {
        let mem = |blocks| -> Arc<dyn Disk> { Arc::new(MemDisk::new(blocks, 512).unwrap()) };
        let (one, two) = (mem(2048), mem(2048));
        let null: Arc<dyn Disk> = Arc::new(NullDisk::new(4096, 512));
        let first = namespace("vm0.sock", 7, &one);
        // No conflict: one disk twice, as in a subsystem, and two disks with different UUIDs.
        assert_eq!(namespace("vm1.sock", 7, &one).conflict(&first), None);
        assert_eq!(namespace("vm1.sock", 8, &two).conflict(&first), None);
        for (disk, name) in [(&two, "mem:1MiB"), (&null, "null:2MiB")] {
            let said = namespace("vm1.sock", 7, disk).conflict(&first).unwrap();
            let both = [
                "mem:1MiB (namespace 1 of vm0.sock)",
                &format!("{name} (namespace 1 of vm1.sock)"),
                "07070707-0707-0707-0707-070707070707",
            ];
            assert!(both.iter().all(|part| said.contains(part)), "{said}");
        }
    }
}
