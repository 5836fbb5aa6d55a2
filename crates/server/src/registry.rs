//! Registry of the served controllers.

use super::open_disk::id_of;
use anyhow::anyhow;
use parking_lot::RwLock;
use shadowbell_config::controller_config::{DiskConfig, nsids};
use shadowbell_config::disk_spec;
use shadowbell_config::server_config::{NamedDisk, SocketConfig};
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
        self.disks().for_each(|disk| disable_limits(&*disk));
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

/// Disables the rate limits of a disk, so that waiting requests proceed.
pub(super) fn disable_limits(disk: &dyn Disk) {
    let limiters = LimitedDisk::of(disk).map_or(&[][..], LimitedDisk::limiters);
    limiters.iter().for_each(|limiter| limiter.open(true));
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

impl WaitingController {
    /// Disks of the controller, with their ids.
    fn disks(&self) -> impl Iterator<Item = (String, &DiskConfig)> {
        let (id, disks) = (self.requested.id(), &self.requested.controller.disks);
        nsids(disks).zip(disks).map(move |(nsid, disk)| (id_of(&id, nsid, disk), disk))
    }
}

/// A disk of a dead process that no controller has, and that is not recovered yet.
#[derive(Clone)]
pub(super) struct WaitingDisk {
    pub(super) id: String,
    pub(super) spec: String,
    /// Reason for the wait.
    pub(super) why: String,
}

/// An item of a dead process that is being recovered.
#[derive(Clone, Debug)]
pub(super) enum RecoveringItem {
    /// The controller with this index in this process.
    Controller(usize),
    /// The disk with this id, which no controller has.
    Disk(String),
}

/// Error for an item that waits for its disks.
fn waits(what: &str, why: &str) -> anyhow::Error {
    exit::conflict(anyhow!("{what} waits ({why}); try again when it is recovered"))
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
    /// Disks of a dead process that no controller has, and that are not recovered yet.
    waiting_disks: RwLock<Vec<WaitingDisk>>,
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

    /// Registers a controller that waits for its disks, with its new index.
    pub(super) fn begin_waiting(&self, index: usize, requested: SocketConfig) {
        let mut waiting = self.waiting.write();
        let at = waiting.partition_point(|other| other.index < index);
        waiting.insert(
            at,
            WaitingController { index, requested, why: "they are being opened".to_owned() },
        );
    }

    /// Registers a disk without a controller whose recovery begins.
    pub(super) fn begin_waiting_disk(&self, id: &str, spec: &str) {
        let (id, spec, why) = (id.to_owned(), spec.to_owned(), "it is being opened".to_owned());
        let disk = WaitingDisk { id, spec, why };
        self.waiting_disks.write().push(disk);
    }

    /// Sets the reason why a controller or disk waits.
    pub(super) fn waits_for(&self, item: &RecoveringItem, why: &str) {
        let (mut waiting, mut disks) = (self.waiting.write(), self.waiting_disks.write());
        let reason = match item {
            RecoveringItem::Controller(index) => {
                waiting.iter_mut().find(|one| one.index == *index).map(|one| &mut one.why)
            }
            RecoveringItem::Disk(id) => {
                disks.iter_mut().find(|one| one.id == *id).map(|one| &mut one.why)
            }
        };
        if let Some(reason) = reason {
            why.clone_into(reason);
        }
    }

    /// Controllers that wait for their disks.
    pub(super) fn waiting(&self) -> Vec<WaitingController> {
        self.waiting.read().clone()
    }

    /// Disks without a controller that are not recovered yet, as entries of a configuration.
    pub(super) fn waiting_disks(&self) -> Vec<NamedDisk> {
        let waiting = self.waiting_disks.read();
        let entry = |one: &WaitingDisk| NamedDisk {
            id: one.id.clone(),
            spec: one.spec.clone(),
            origin: None,
        };
        waiting.iter().map(entry).collect()
    }

    /// Returns an error if the controller with this id or socket path waits for its disks; for
    /// `None`, if any controller or disk waits.
    ///
    /// # Errors
    /// The controller or a disk waits.
    pub(super) fn check_waiting(&self, id: Option<&str>) -> anyhow::Result<()> {
        let waiting = self.waiting.read();
        let is_it = |one: &&WaitingController| {
            id.is_none_or(|id| one.requested.id() == id || one.requested.canonical_socket() == id)
        };
        if let Some(one) = waiting.iter().find(is_it) {
            return Err(exit::conflict(anyhow!(
                "the controller {} waits for its disks ({}); try again when it is served",
                one.requested.id(),
                one.why
            )));
        }
        match self.waiting_disks.read().first().filter(|_| id.is_none()) {
            Some(disk) => Err(waits(&format!("the disk {}", disk.id), &disk.why)),
            None => Ok(()),
        }
    }

    /// Returns an error if the recovery is to open the disk with this id: a second opening would
    /// not wait for the I/O of the dead process.
    ///
    /// # Errors
    /// The disk waits for its recovery.
    pub(super) fn check_waiting_disk(&self, id: &str) -> anyhow::Result<()> {
        if let Some(disk) = self.waiting_disks.read().iter().find(|disk| disk.id == id) {
            return Err(waits(&format!("the disk {id}"), &disk.why));
        }
        let waiting = self.waiting.read();
        let has = |one: &&WaitingController| one.disks().any(|(other, _)| other == id);
        match waiting.iter().find(has) {
            Some(one) => Err(waits(
                &format!("the disk {id} of the controller {}", one.requested.id()),
                &one.why,
            )),
            None => Ok(()),
        }
    }

    /// Returns an error if the recovery is to open the source of this disk, unless both only read.
    /// Each disk in memory has a source of its own.
    ///
    /// # Errors
    /// A disk with the same source waits for its recovery.
    pub(super) fn check_waiting_source(&self, spec: &str) -> anyhow::Result<()> {
        if matches!(disk_spec::scheme(spec), Some("mem" | "null")) {
            return Ok(());
        }
        let source = |spec: &str| {
            // The address of some NBD servers is an option.
            let (_, socket) = disk_spec::take_option(spec, "socket");
            (DiskConfig::of(spec).exclusive_resources(), socket)
        };
        let (wanted, reads) = (source(spec), disk_spec::is_read_only(spec));
        let is_it =
            |other: &str| source(other) == wanted && !(reads && disk_spec::is_read_only(other));
        let (waiting, disks) = (self.waiting.read(), self.waiting_disks.read());
        let of_controllers = waiting.iter().flat_map(|one| {
            one.disks().map(move |(id, disk)| (id, disk.disk.as_str(), one.why.as_str()))
        });
        let mut all = disks
            .iter()
            .map(|one| (one.id.clone(), one.spec.as_str(), one.why.as_str()))
            .chain(of_controllers);
        match all.find(|(_, other, _)| is_it(other)) {
            Some((id, _, why)) => {
                Err(waits(&format!("{} is the source of the disk {id}, which", wanted.0), why))
            }
            None => Ok(()),
        }
    }

    /// Records that a disk without a controller was recovered.
    pub(super) fn recovered_disk(&self, id: &str) {
        self.waiting_disks.write().retain(|one| one.id != id);
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
    use shadowbell_config::controller_config::ControllerConfig;
    use shadowbell_disk_file::{MemDisk, NullDisk};

    /// Returns a namespace whose UUID has the byte `uuid` 16 times.
    fn namespace(controller: &str, uuid: u8, disk: &Arc<dyn Disk>) -> Identified {
        let config = NamespaceConfig { disk: Arc::clone(disk), uuid: [uuid; 16] };
        Identified { controller: controller.to_owned(), nsid: 1, config }
    }

    /// The disks of a dead process belong to the recovery until they are recovered.
    #[test]
    fn a_waiting_disk_is_known_by_its_id_and_source() {
        let registry = Registry::default();
        let disks = ["nbd://host/one", "mem:1MiB"].map(DiskConfig::of).to_vec();
        let requested = SocketConfig {
            id: Some("vm".to_owned()),
            socket: "/run/vm.sock".into(),
            controller: ControllerConfig { disks, ..ControllerConfig::default() },
            worker: None,
            origin: None,
        };
        registry.begin_waiting(3, requested);
        let at = |name: &str| format!("nbd+unix:///x?socket=/run/{name}");
        registry.begin_waiting_disk("far", &at("a"));
        registry.begin_waiting_disk("shared", "/base.img?read-only=on");
        for id in ["far", "shared", "vm/1", "vm/2"] {
            assert!(registry.check_waiting_disk(id).is_err(), "{id}");
        }
        assert!(registry.check_waiting_disk("other").is_ok());
        for (spec, waits) in [
            ("nbd://host/one?settle=1s", true),
            ("nbd://host/two", false),
            (&*at("a"), true),
            (&*at("b"), false),
            ("mem:1MiB", false),
            ("/base.img", true),
            ("/base.img?read-only=on", false),
        ] {
            assert_eq!(registry.check_waiting_source(spec).is_err(), waits, "{spec}");
        }
        registry.waits_for(&RecoveringItem::Disk("far".to_owned()), "it is mute");
        let error = registry.check_waiting_disk("far").unwrap_err().to_string();
        assert!(error.contains("the disk far waits (it is mute)"), "{error}");
        assert!(registry.check_waiting(None).is_err());
        registry.recovered_disk("far");
        assert!(registry.check_waiting_disk("far").is_ok());
        assert!(registry.check_waiting_source(&at("a")).is_ok());
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
