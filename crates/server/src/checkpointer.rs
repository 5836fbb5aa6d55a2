//! Checkpoint for recovery: sends the supervisor the state that the next process needs if this
//! process dies.
//!
//! The checkpoint consists of items: [`fence`](FENCE); [`attempts`](ATTEMPTS); `old`, by which a
//! [store](super::checkpoint_store) marks the other items as outdated; `disk/N.M`, `controller/N`
//! and `port/N`, each with descriptors; `file/N.M`, the files of a client's memory if there are
//! many; and, once all of them are sent, the list of what is served ([`COMPLETE`]), which names the
//! other items.
//!
//! Changes at run time are ordered so that the checkpoint is valid at every moment: a new item is
//! sent before the list names it, and an item is removed from the list before it is deleted. A
//! process that recovers uses new keys. Its list names the items of the dead process for each
//! controller that is not recovered yet, and has the fence of the dead process too. While a
//! namespace changes, the list names both the old and the new disk. A recovery uses the disk in the
//! state of the controller, because the guest may have seen this disk.

use super::checkpoint_items::{self, ENDPOINTS, QUIESCED, Served};
use super::checkpoint_store::CheckpointStore;
use super::fence_wait::FenceWait;
use super::open_disk::{UnattachedDisks, id_of};
use super::recovery_attempts::{ATTEMPTS, Attempts, Replay};
use super::registry::ServedController;
use super::worker_link::WorkerLink;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_config::controller_config::{DiskConfig, nsids};
use shadowbell_config::export_config::ExportConfig;
use shadowbell_config::limits::{self, Group};
use shadowbell_config::server_config::SocketConfig;
use shadowbell_controller::{
    CauseOfDeath, NamespaceConfig, Recorder, SavedController, SeenNamespace,
};
use shadowbell_disk::Disk;
use shadowbell_state::{Descriptors, LastingChange, VERSION};
use shadowbell_supervisor::checkpoint::{COMPLETE, Change};
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::{PortId, PortRecorder, SavedPort};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use tracing::info;

/// Key of the item with the fence descriptor, which shows that all I/O of the process has ended.
/// The item has no body.
pub(super) const FENCE: &str = "fence";

/// Item [`COMPLETE`]: list of what is served, and the format version of the other items' states.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Complete {
    pub(super) version: u32,
    pub(super) served: Vec<Served>,
    /// True if the list differs from the configuration.
    pub(super) is_changed: bool,
    pub(super) controllers: Vec<ControllerEntry>,
    pub(super) groups: Vec<Group>,
    /// Disks that no controller has, by id.
    #[serde(default)]
    pub(super) unattached: BTreeMap<String, UnattachedEntry>,
    #[serde(default)]
    pub(super) exports: Vec<ExportConfig>,
}

/// A disk in the checkpoint that no controller has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct UnattachedEntry {
    pub(super) key: String,
    pub(super) spec: String,
    /// Cause of death of the process that sent the item. `None` once the disk is recovered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) died: Option<CauseOfDeath>,
}

/// A controller in the checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ControllerEntry {
    /// Index of the controller. The keys of the controller's items contain it.
    pub(super) index: usize,
    /// Configuration of the controller. Its list of disks may be outdated; `disks` is decisive.
    #[serde(rename = "asked")]
    pub(super) requested: SocketConfig,
    /// Disks of the controller's namespaces. A namespace that is being changed has two disks, the
    /// new one first.
    pub(super) disks: Vec<DiskEntry>,
    /// NSIDs of namespaces that are being changed. The guest may have seen the old or the new state
    /// of these.
    pub(super) changing: Vec<u32>,
    /// Cause of death of the process that sent the items. `None` once the controller is recovered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) died: Option<CauseOfDeath>,
}

/// A disk in the checkpoint, and the properties of its namespace.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DiskEntry {
    key: String,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    share: bool,
    nsid: u32,
    pub(super) disk: String,
    uuid: [u8; 16],
    blocks: u64,
    read_only: bool,
}

impl ControllerEntry {
    /// Configuration of the controller with the given subset of its disks.
    pub(super) fn config_with(&self, disks: &[&DiskEntry]) -> SocketConfig {
        let mut requested = self.requested.clone();
        let is_same = requested.controller.disks.len() == disks.len()
            && requested
                .controller
                .disks
                .iter()
                .zip(disks)
                .all(|(one, entry)| one.disk == entry.disk);
        // If the disks are unchanged, the configuration stays as it was written: it may leave out
        // UUIDs and NSIDs, which the entries of the disks always have.
        if !is_same || !self.changing.is_empty() {
            requested.controller.disks = disks.iter().map(|entry| entry.config()).collect();
        }
        requested
    }

    /// Ids of the controller's disks.
    pub(super) fn disk_ids(&self) -> impl Iterator<Item = String> + use<'_> {
        let id = self.requested.id();
        self.disks.iter().map(move |disk| id_of(&id, disk.nsid, &disk.config()))
    }

    /// Disks of the controller's namespaces, one each: the new disk if the namespace is being
    /// changed.
    pub(super) fn newest_disks(&self) -> Vec<&DiskEntry> {
        let mut seen = BTreeSet::new();
        self.disks.iter().filter(|disk| seen.insert(disk.nsid)).collect()
    }

    /// Returns the disk of the namespace that had the properties `seen` when the guest identified
    /// it.
    pub(super) fn disk_of(&self, seen: &SeenNamespace) -> Option<&DiskEntry> {
        self.disks.iter().find(|entry| {
            (entry.nsid, entry.uuid) == (seen.nsid, seen.uuid)
                && (entry.blocks, entry.read_only) == (seen.blocks, seen.read_only)
        })
    }
}

impl DiskEntry {
    /// Key of the disk's item.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// Configuration of the disk.
    pub(super) fn config(&self) -> DiskConfig {
        DiskConfig {
            id: self.id.clone(),
            disk: self.disk.clone(),
            uuid: Some(self.uuid),
            nsid: Some(self.nsid),
            share: self.share,
        }
    }
}

/// Entries of a dead process that are not recovered yet.
#[derive(Default)]
pub(super) struct Pending {
    /// Controllers by their indices in the new process.
    pub(super) controllers: BTreeMap<usize, ControllerEntry>,
    pub(super) unattached: BTreeMap<String, UnattachedEntry>,
}

/// Sender of the checkpoint, shared by all code that changes the checkpoint. Created before any
/// disk is opened.
pub(super) struct Checkpointer {
    store: CheckpointStore,
    fence: OwnedFd,
    state: Mutex<State>,
    watched: Arc<WatchedDisks>,
}

/// Disks by the keys of their items. Several items may be of one disk, as with the controllers of
/// a subsystem.
#[derive(Default)]
struct WatchedDisks(Mutex<BTreeMap<String, Weak<dyn Disk>>>);

impl WatchedDisks {
    /// Sends all items of the disk with this name. The lock is held meanwhile, so that no item is
    /// sent after its deletion.
    fn send(&self, store: &CheckpointStore, name: &str) {
        for (key, disk) in &*self.0.lock() {
            if let Some(disk) = disk.upgrade().filter(|disk| disk.name() == name) {
                // The error is ignored, because the store has logged it.
                let _ = put_disk(store, key, &*disk);
            }
        }
    }
}

#[derive(Default)]
struct State {
    /// True if the first items were sent, and the checkpoint was not given up after an error.
    is_possible: bool,
    /// True if all items were sent, so that the list can be sent.
    is_complete: bool,
    /// True if the served controllers, disks or exports differ from the configuration.
    is_changed: bool,
    controllers: BTreeMap<usize, ControllerEntry>,
    /// Controllers of the dead process that are not recovered yet, by their indices in this
    /// process.
    pending: BTreeMap<usize, ControllerEntry>,
    /// Keys of the `file/N.M` items, by controller.
    files: BTreeMap<usize, BTreeSet<String>>,
    /// Controllers whose `port` item is not sent yet.
    unrecorded: BTreeMap<usize, ControllerEntry>,
    /// Disks that no controller has, by id.
    unattached: BTreeMap<String, UnattachedEntry>,
    exports: Vec<ExportConfig>,
    /// Number of disk items sent so far, for unique keys.
    disks: u64,
}

impl Checkpointer {
    /// Creates the checkpoint and its fence.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn new(link: &WorkerLink) -> io::Result<Arc<Self>> {
        let (store, fence) = (link.store()?, shadowbell_disk_file::fence()?);
        Ok(Arc::new(Self { store, fence, state: Mutex::default(), watched: Arc::default() }))
    }

    /// Sends the items of all controllers; [`complete`](Checkpointer::complete) makes them valid.
    /// If an item cannot be sent, the error is logged, and the service continues without a
    /// checkpoint. `is_changed`: the served controllers differ from the configuration.
    pub(super) fn begin(
        self: &Arc<Self>,
        controllers: &[Arc<ServedController>],
        reactor: &mut Reactor,
        ports: &[PortId],
        is_changed: bool,
    ) {
        let outcome = self.put_all(controllers, reactor, ports);
        let mut state = self.state.lock();
        (state.is_possible, state.is_changed) = (outcome.is_ok(), is_changed);
        drop(state);
        if let Err(why) = outcome {
            self.give_up(&why);
        }
    }

    /// Begins the checkpoint of a process that recovers. The checkpoint contains the fence, the
    /// recovery attempts and the `pending` entries of the dead process, whose disk items are
    /// numbered up to `disks`.
    pub(super) fn begin_recovery(
        &self,
        fence: &FenceWait,
        attempts: &Attempts,
        pending: Pending,
        disks: u64,
        is_changed: bool,
    ) {
        let ends = [&self.fence].into_iter().chain(fence.ends());
        let ends: Vec<_> = ends.map(AsFd::as_fd).collect();
        let begun = self.store.begin([(FENCE, &ends[..]), (ATTEMPTS, &[attempts.fd()])]);
        let mut state = self.state.lock();
        let Pending { controllers, unattached } = pending;
        (state.pending, state.unattached) = (controllers, unattached);
        (state.is_possible, state.is_changed) = (begun.is_ok(), is_changed);
        state.disks = disks;
        drop(state);
        if let Err(error) = begun {
            self.give_up(&error.into());
        }
    }

    /// Sends the items of the disks that no controller has, and the list of exports.
    pub(super) fn put_others(&self, unattached: &UnattachedDisks, exports: Vec<ExportConfig>) {
        for (id, open) in &*unattached.lock() {
            self.put_unattached(id, &open.spec, &open.disk);
        }
        self.set_exports(exports);
    }

    /// Makes the checkpoint valid by sending the list. The items of all controllers must have been
    /// sent.
    pub(super) fn complete(&self) {
        self.state.lock().is_complete = true;
        self.publish();
    }

    fn put_all(
        self: &Arc<Self>,
        controllers: &[Arc<ServedController>],
        reactor: &mut Reactor,
        ports: &[PortId],
    ) -> anyhow::Result<()> {
        // A disk without support for recovery is an error here, before any item is sent.
        for disk in controllers.iter().flat_map(|served| served.disks()) {
            disk.checkpoint(&mut Descriptors::default())?;
        }
        let attempts = Attempts::new()?;
        let fence = self.fence.as_fd();
        self.store.begin([(FENCE, &[fence]), (ATTEMPTS, &[attempts.fd()])])?;
        controllers.iter().zip(ports).try_for_each(|(served, port)| {
            let entry = self.put_controller(served)?;
            self.state.lock().controllers.insert(served.index, entry);
            reactor.record_with(*port, self.port_recorder(served.index));
            Ok(())
        })
    }

    /// Sends the items of a controller before it is served; [`port_recorder`](Self::port_recorder)
    /// adds the socket. Returns false if there is no checkpoint, or if an error has just ended it.
    pub(super) fn add(self: &Arc<Self>, served: &ServedController) -> bool {
        if !self.is_possible() {
            return false;
        }
        match self.put_controller(served) {
            Ok(entry) => {
                self.state.lock().unrecorded.insert(served.index, entry);
                true
            }
            Err(why) => {
                self.give_up(&why);
                false
            }
        }
    }

    /// Sends the items of a recovered controller, except its socket. Returns the entry for the
    /// list; `None` if there is no checkpoint, or if an error has just ended it.
    pub(super) fn put_recovered(
        self: &Arc<Self>,
        served: &ServedController,
    ) -> Option<ControllerEntry> {
        if !self.is_possible() {
            return None;
        }
        self.put_controller(served).inspect_err(|why| self.give_up(why)).ok()
    }

    /// Deletes the disk items that this process has sent for a controller whose recovery then
    /// failed.
    pub(super) fn discard(&self, entry: Option<&ControllerEntry>) {
        let disks = entry.into_iter().flat_map(|entry| &entry.disks);
        disks.for_each(|disk| self.delete_disk(&disk.key));
    }

    /// Replaces a pending controller by the recovered one, before the first list is sent.
    pub(super) fn recovered(&self, index: usize, entry: Option<ControllerEntry>) {
        let mut state = self.state.lock();
        state.pending.remove(&index);
        if let Some(entry) = entry {
            state.controllers.insert(index, entry);
        }
    }

    /// Stores the entry of a recovered controller. When the controller's socket is first recorded,
    /// the entry replaces the pending controller in the list.
    pub(super) fn put_unrecorded(&self, index: usize, entry: Option<ControllerEntry>) {
        if let Some(entry) = entry {
            self.state.lock().unrecorded.insert(index, entry);
        }
    }

    /// Deletes items of the dead process that the list does not name any more.
    pub(super) fn delete_old(&self, keys: &[String]) {
        if self.is_possible() {
            let changes: Vec<_> = keys.iter().map(|key| Change::Delete { key }).collect();
            // The error is ignored, because the store has logged it.
            let _ = self.store.change(&changes);
        }
    }

    /// Ends the recovery, and removes the fence of the dead process from the checkpoint.
    pub(super) fn end_recovery(&self) {
        if self.is_possible() {
            // The error is ignored, because the store has logged it.
            let _ = self.store.put(FENCE, &[], &[self.fence.as_fd()]);
        }
    }

    /// Returns the recorder for a controller's socket. Its first record adds the controller to the
    /// list.
    pub(super) fn port_recorder(self: &Arc<Self>, index: usize) -> Box<dyn PortRecorder> {
        Box::new(PortRecord { checkpointer: Arc::clone(self), index, replay: None })
    }

    /// Returns the recorder for the socket of a recovered controller.
    pub(super) fn recovered_port_recorder(
        self: &Arc<Self>,
        index: usize,
        attempts: &Arc<Attempts>,
    ) -> Box<dyn PortRecorder> {
        let replay = Some(Replay::of(attempts, index));
        Box::new(PortRecord { checkpointer: Arc::clone(self), index, replay })
    }

    /// Removes a controller from the list, before the server removes the controller.
    pub(super) fn begin_removal(&self, index: usize) {
        let mut state = self.state.lock();
        state.controllers.remove(&index);
        state.unrecorded.remove(&index);
        state.is_changed = true;
        drop(state);
        self.publish();
    }

    /// Deletes the items of a removed controller, whose disks were `disks`.
    pub(super) fn end_removal(&self, index: usize, disks: &[DiskEntry]) {
        if self.is_possible() {
            let own = [checkpoint_items::controller(index), checkpoint_items::port(index)];
            let files = self.state.lock().files.remove(&index).unwrap_or_default();
            for key in own.iter().chain(&files) {
                let _ = self.store.delete(key);
            }
            disks.iter().for_each(|disk| self.delete_disk(&disk.key));
        }
    }

    /// Disks of a controller.
    pub(super) fn disks(&self, index: usize) -> Vec<DiskEntry> {
        let state = self.state.lock();
        state.controllers.get(&index).map(|entry| entry.disks.clone()).unwrap_or_default()
    }

    /// Records that a namespace is about to get the disk `after`, or to be removed (`None`). Until
    /// [`end_change`](Self::end_change), the guest may have seen the old or the new state.
    pub(super) fn begin_change(
        &self,
        index: usize,
        nsid: u32,
        after: Option<(&DiskConfig, &NamespaceConfig)>,
    ) {
        if !self.is_possible() {
            return;
        }
        let after = after.map(|(disk, config)| self.put_namespace_disk(index, nsid, disk, config));
        let after = match after.transpose() {
            Ok(after) => after,
            Err(why) => return self.give_up(&why),
        };
        let mut state = self.state.lock();
        if let Some(entry) = state.controllers.get_mut(&index) {
            entry.changing.push(nsid);
            let _ = after.map(|disk| entry.disks.insert(0, disk));
        }
        state.is_changed = true;
        drop(state);
        self.publish();
    }

    /// Records the end of a namespace's change, which has succeeded (`done`) or failed. `requested`
    /// is the controller's configuration after this.
    pub(super) fn end_change(&self, index: usize, nsid: u32, done: bool, requested: &SocketConfig) {
        let mut unused = Vec::new();
        let mut state = self.state.lock();
        if let Some(entry) = state.controllers.get_mut(&index) {
            entry.requested = requested.clone();
            entry.changing.retain(|other| *other != nsid);
            let is_there = nsids(&requested.controller.disks).any(|other| other == nsid);
            let (own, others): (Vec<_>, Vec<_>) =
                entry.disks.drain(..).partition(|disk| disk.nsid == nsid);
            entry.disks = others;
            // During a change of the disk, `own` has the new disk first and the old one last.
            let remaining = if done { own.first() } else { own.last() };
            let remaining = remaining.filter(|_| is_there).cloned();
            unused = own;
            unused.retain(|disk| remaining.as_ref().is_none_or(|one| one.key != disk.key));
            entry.disks.extend(remaining);
        }
        drop(state);
        self.publish();
        if self.is_possible() {
            unused.iter().for_each(|disk| self.delete_disk(&disk.key));
        }
    }

    /// Updates a namespace's disk specification and its controller's configuration.
    pub(super) fn set_disk_spec(
        &self,
        index: usize,
        nsid: u32,
        spec: String,
        requested: &SocketConfig,
    ) {
        let mut state = self.state.lock();
        if let Some(entry) = state.controllers.get_mut(&index) {
            entry.requested = requested.clone();
            if let Some(disk) = entry.disks.iter_mut().find(|disk| disk.nsid == nsid) {
                disk.disk = spec;
            }
        }
        drop(state);
        self.publish_change();
    }

    /// Updates a controller's configuration; the disks stay the same.
    pub(super) fn set_config(&self, index: usize, requested: &SocketConfig) {
        let mut state = self.state.lock();
        if let Some(entry) = state.controllers.get_mut(&index) {
            entry.requested = requested.clone();
        }
        drop(state);
        self.publish_change();
    }

    /// Sends the list again after a change that affects no controller's entry.
    pub(super) fn publish_change(&self) {
        self.state.lock().is_changed = true;
        self.publish();
    }

    /// Adds the serialized management endpoints, with their descriptors, to the checkpoint.
    ///
    /// # Errors
    /// The item cannot be sent.
    pub(super) fn put_endpoints(
        &self,
        saved: &impl Serialize,
        fds: &Descriptors,
    ) -> anyhow::Result<()> {
        Ok(self.store.put_state(ENDPOINTS, saved, fds)?)
    }

    /// Adds an item without descriptors to the checkpoint.
    ///
    /// # Errors
    /// The item cannot be sent.
    pub(super) fn put(&self, key: &str, state: &impl Serialize) -> anyhow::Result<()> {
        Ok(self.store.put_state(key, state, &Descriptors::default())?)
    }

    /// Deletes the items that are only valid while the process is quiesced. Called before the state
    /// of the process changes again.
    pub(super) fn delete_quiesced(&self) {
        for key in [ENDPOINTS, QUIESCED] {
            // The error is ignored, because the store has logged it.
            let _ = self.store.delete(key);
        }
    }

    fn is_possible(&self) -> bool {
        self.state.lock().is_possible
    }

    /// Invalidates the checkpoint until the end of this process.
    fn give_up(&self, why: &anyhow::Error) {
        info!("the clients will lose their controllers if this process crashes: {why:#}");
        self.state.lock().is_possible = false;
        // The list is deleted, because the supervisor may still have the list of the previous
        // process.
        let _ = self.store.delete(COMPLETE);
    }

    /// Returns true if the next process could recover from the checkpoint.
    pub(super) fn is_valid(&self) -> bool {
        let state = self.state.lock();
        state.is_possible && state.is_complete
    }

    /// Sends the list of what is served.
    fn publish(&self) {
        let state = self.state.lock();
        if !state.is_possible || !state.is_complete {
            return;
        }
        let all: BTreeMap<_, _> = state.pending.iter().chain(&state.controllers).collect();
        let controllers: Vec<_> = all.into_values().cloned().collect();
        let complete = Complete {
            version: VERSION,
            served: checkpoint_items::served_of(controllers.iter().map(|entry| &entry.requested)),
            is_changed: state.is_changed,
            controllers,
            groups: limits::groups(),
            unattached: state.unattached.clone(),
            exports: state.exports.clone(),
        };
        // The lock is held while the list is sent, so that lists are sent in the order of the
        // changes. The error is ignored, because the store has logged it.
        let _ = self.store.put_state(COMPLETE, &complete, &Descriptors::default());
    }

    fn put_controller(
        self: &Arc<Self>,
        served: &ServedController,
    ) -> anyhow::Result<ControllerEntry> {
        let index = served.index;
        let requested = served.requested();
        let mut disks = Vec::new();
        let namespaces = served.controller.namespaces();
        for ((nsid, config), disk) in namespaces.iter().zip(&requested.controller.disks) {
            disks.push(self.put_namespace_disk(index, *nsid, disk, config)?);
        }
        let recorder =
            Record { store: self.store.clone(), key: checkpoint_items::controller(index) };
        served.controller.record_with(Arc::new(recorder))?;
        let (requested, changing) = ((*requested).clone(), Vec::new());
        Ok(ControllerEntry { index, requested, disks, changing, died: None })
    }

    fn put_namespace_disk(
        &self,
        index: usize,
        nsid: u32,
        disk: &DiskConfig,
        config: &NamespaceConfig,
    ) -> anyhow::Result<DiskEntry> {
        let nth = self.next_disk();
        let key = format!("disk/{index}.{nth}");
        self.put_disk(&key, &config.disk)?;
        let info = config.disk.info();
        let DiskConfig { id, disk, share, .. } = disk.clone();
        let (uuid, blocks, read_only) = (config.uuid, info.blocks, info.read_only);
        Ok(DiskEntry { key, id, share, nsid, disk, uuid, blocks, read_only })
    }

    fn next_disk(&self) -> u64 {
        let mut state = self.state.lock();
        state.disks += 1;
        state.disks
    }

    /// Sends the item of a disk, now and whenever the disk's state changes.
    fn put_disk(&self, key: &str, disk: &Arc<dyn Disk>) -> anyhow::Result<()> {
        self.watched.0.lock().insert(key.to_owned(), Arc::downgrade(disk));
        let (store, watched, name) = (self.store.clone(), Arc::clone(&self.watched), disk.name());
        // The lock is not held, because a disk may hold a lock of its own during the callback.
        disk.on_change(Box::new(move || watched.send(&store, &name)));
        let _watched = self.watched.0.lock();
        put_disk(&self.store, key, &**disk)
    }

    /// Deletes the item of a disk.
    fn delete_disk(&self, key: &str) {
        self.watched.0.lock().remove(key);
        if self.is_possible() {
            // The error is ignored, because the store has logged it.
            let _ = self.store.delete(key);
        }
    }

    /// Sends the item of a disk that no controller has. An earlier item of the disk is replaced.
    pub(super) fn put_unattached(&self, id: &str, spec: &str, disk: &Arc<dyn Disk>) {
        if !self.is_possible() {
            return;
        }
        let key = format!("disk/unattached.{}", self.next_disk());
        if let Err(why) = self.put_disk(&key, disk) {
            return self.give_up(&why);
        }
        let entry = UnattachedEntry { key, spec: spec.to_owned(), died: None };
        let mut state = self.state.lock();
        let before = state.unattached.insert(id.to_owned(), entry);
        let is_recovered = before.as_ref().is_some_and(|before| before.died.is_some());
        state.is_changed |= state.is_complete && !is_recovered;
        drop(state);
        self.publish();
        if let Some(before) = before {
            self.delete_disk(&before.key);
        }
    }

    /// Sends the descriptor of `/dev/fuse` of an export.
    pub(super) fn put_fuse_device(&self, id: &str, device: BorrowedFd<'_>) {
        if self.is_possible() {
            // The error is ignored, because the store has logged it.
            let _ = self.store.put(&checkpoint_items::fuse_device(id), &[], &[device]);
        }
    }

    /// Deletes the descriptor of `/dev/fuse` of a removed export.
    pub(super) fn drop_fuse_device(&self, id: &str) {
        let _ = self.store.delete(&checkpoint_items::fuse_device(id));
    }

    /// Sets the exports of the list, and sends the list.
    pub(super) fn set_exports(&self, exports: Vec<ExportConfig>) {
        let mut state = self.state.lock();
        state.exports = exports;
        state.is_changed |= state.is_complete;
        drop(state);
        self.publish();
    }

    /// Deletes the item of a disk that was removed, or was attached to a controller.
    pub(super) fn drop_unattached(&self, id: &str) {
        let mut state = self.state.lock();
        let Some(entry) = state.unattached.remove(id) else { return };
        state.is_changed = true;
        drop(state);
        self.publish();
        self.delete_disk(&entry.key);
    }
}

fn put_disk(store: &CheckpointStore, key: &str, disk: &dyn Disk) -> anyhow::Result<()> {
    let mut fds = Descriptors::default();
    let state = disk.checkpoint(&mut fds)?;
    Ok(store.put_state(key, &state, &fds)?)
}

/// Recorder that sends a controller's state.
struct Record {
    store: CheckpointStore,
    key: String,
}

impl Recorder for Record {
    fn record(&self, state: &SavedController, fds: Descriptors) {
        // The error is ignored, because the store has logged it.
        let _ = self.store.put_state(&self.key, state, &fds);
    }
}

/// Recorder that sends a socket's state.
struct PortRecord {
    checkpointer: Arc<Checkpointer>,
    index: usize,
    /// Replay of the client, if the controller was recovered.
    replay: Option<Replay>,
}

impl PortRecord {
    /// Sends the state of the socket. The same transaction adds and deletes the items of memory
    /// files that the client has added and removed.
    fn put(&self, state: &SavedPort, fds: &mut Descriptors) {
        let body = match serde_json::to_vec(state) {
            Ok(body) => body,
            Err(error) => return self.checkpointer.give_up(&error.into()),
        };
        let (mut put, mut removed) = (Vec::new(), Vec::new());
        for change in fds.take_changes() {
            match change {
                LastingChange::Put(number, fd) => {
                    put.push((checkpoint_items::client_file(self.index, number), fd));
                }
                LastingChange::Remove(number) => {
                    removed.push(checkpoint_items::client_file(self.index, number));
                }
            }
        }
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let files: Vec<_> = put.iter().map(|(key, fd)| (key, [fd.as_fd()])).collect();
        let key = checkpoint_items::port(self.index);
        let port = Change::Put { key: &key, body: &body, fds: &fds };
        let files = files.iter().map(|(key, fds)| Change::Put { key, body: &[], fds });
        let deleted = removed.iter().map(|key| Change::Delete { key });
        let changes: Vec<_> = deleted.chain(files).chain([port]).collect();
        // The error is ignored, because the store has logged it.
        let _ = self.checkpointer.store.change(&changes);
        drop(changes);
        let mut state = self.checkpointer.state.lock();
        let files = state.files.entry(self.index).or_default();
        for key in &removed {
            files.remove(key);
        }
        files.extend(put.into_iter().map(|(key, _)| key));
    }
}

impl PortRecorder for PortRecord {
    fn record(&mut self, state: &SavedPort, mut fds: Descriptors) {
        self.put(state, &mut fds);
        let mut state = self.checkpointer.state.lock();
        if let Some(unrecorded) = state.unrecorded.remove(&self.index) {
            state.controllers.insert(self.index, unrecorded);
            state.is_changed |= state.pending.remove(&self.index).is_none();
            drop(state);
            self.checkpointer.publish();
        }
    }

    fn begin_replay(&mut self) -> bool {
        self.replay.as_mut().is_none_or(Replay::begin)
    }

    fn end_replay(&mut self, is_done: bool) {
        self.replay.iter().for_each(|replay| replay.end(is_done));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use shadowbell_disk::{CheckpointError, DiskInfo, Queue};
    use shadowbell_supervisor::checkpoint::Checkpoint;
    use shadowbell_supervisor::protocol;
    use std::fmt::{self, Debug, Formatter};
    use std::sync::atomic::{AtomicBool, Ordering};

    /// A disk that loses writes when the test calls [`lose`](Self::lose).
    #[derive(Default)]
    struct Lossy {
        name: &'static str,
        is_lost: AtomicBool,
        changed: Mutex<Option<Box<dyn Fn() + Send + Sync>>>,
    }

    impl Lossy {
        fn lose(&self) {
            self.is_lost.store(true, Ordering::Relaxed);
            self.changed.lock().as_ref().unwrap()();
        }
    }

    impl Debug for Lossy {
        fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
            f.write_str(self.name)
        }
    }

    impl Disk for Lossy {
        fn info(&self) -> DiskInfo {
            DiskInfo::new(512, 8)
        }

        fn queue(&self) -> io::Result<Box<dyn Queue>> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn name(&self) -> String {
            self.name.to_owned()
        }

        fn checkpoint(&self, _: &mut Descriptors) -> Result<Value, CheckpointError> {
            Ok(json!(self.is_lost.load(Ordering::Relaxed)))
        }

        fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
            *self.changed.lock() = Some(changed);
        }
    }

    /// Controllers of a subsystem have one disk, and the next process recovers it from the item of
    /// any of them.
    #[test]
    fn each_item_of_a_disk_has_its_loss_of_writes() {
        let (supervisor, worker) = protocol::pair().unwrap();
        let checkpointer = Checkpointer::new(&WorkerLink::from_socket(worker)).unwrap();
        checkpointer.state.lock().is_possible = true;
        let mut items = Checkpoint::default();
        let mut items_of = |keys: &[&str]| {
            while let Ok(Some(packet)) = protocol::receive(&supervisor, true) {
                items.take(&packet.body, packet.fds).unwrap();
            }
            let body = |key: &&str| Some(items.all.get(*key)?.copy().unwrap().0);
            let text = |body: Option<Vec<u8>>| body.map(|body| String::from_utf8(body).unwrap());
            keys.iter().map(|key| text(body(key)).unwrap_or_default()).collect::<Vec<_>>()
        };
        let keys = ["disk/0.1", "disk/1.2", "disk/unattached.3", "disk/2.4"];
        let [shared, other] =
            ["shared", "other"].map(|name| Arc::new(Lossy { name, ..Lossy::default() }));
        for (key, disk) in keys.into_iter().zip([&shared, &shared, &shared, &other]) {
            let disk: Arc<dyn Disk> = disk.clone();
            checkpointer.put_disk(key, &disk).unwrap();
        }
        assert_eq!(items_of(&keys), ["false"; 4]);
        checkpointer.delete_disk(keys[2]);
        shared.lose();
        assert_eq!(items_of(&keys), ["true", "true", "", "false"]);
    }
}
