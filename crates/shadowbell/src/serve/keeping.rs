//! Has the keeper hold what the next process needs, should this one die.
//!
//! Items: [`fence`](FENCE); `old`, by which a [store](super::store) says that the others are old;
//! `disk/N.M`, `controller/N` and `port/N`, each with descriptors of its own; `file/N.M`, the files
//! of a client's memory if they are many; and, when all of them are there, what is served, which
//! names the others.
//!
//! A change while the server runs has an order in which every moment is one to go on from. What
//! comes is there before it is named, and what goes is named no more before it goes. While a
//! namespace changes, the disks of before and after are both named: which of them counts is what
//! the record of the controller says, which has the namespaces that its guest may have seen.

use super::registry::ServedController;
use super::server_config::SocketConfig;
use super::store::Store;
use super::transfer::{self, Served};
use super::worker_link::WorkerLink;
use crate::controller_config::{DiskConfig, nsids};
use crate::items::{COMPLETE, Change};
use crate::limits::{self, Group};
use anyhow::Context;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_backend::Disk;
use shadowbell_controller::{NamespaceConfig, Recorder, SavedController, SeenNamespace};
use shadowbell_state::{Descriptors, LastingChange, VERSION};
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::{PortId, PortRecorder, SavedPort};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use tracing::info;

/// Shows when all that the process had under way has ended; without a body.
pub(super) const FENCE: &str = "fence";

/// What is served, and by which state version the other items are written.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Complete {
    pub(super) version: u32,
    pub(super) served: Vec<Served>,
    /// It is not what the configuration says.
    pub(super) is_changed: bool,
    pub(super) controllers: Vec<KeptController>,
    pub(super) groups: Vec<Group>,
}

/// A controller that the keeper holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct KeptController {
    /// Its number, by which its items are called.
    pub(super) index: usize,
    /// As it was asked for, apart from its disks.
    pub(super) asked: SocketConfig,
    /// Those of its namespaces, and of a namespace that is being changed both, the new one first.
    pub(super) disks: Vec<KeptDisk>,
    /// Namespaces of whose change the guest may not know yet.
    pub(super) changing: Vec<u32>,
}

/// A disk that the keeper holds, and the namespace that it makes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct KeptDisk {
    key: String,
    nsid: u32,
    pub(super) disk: String,
    uuid: [u8; 16],
    blocks: u64,
    read_only: bool,
}

impl KeptController {
    /// How it is asked for, with these of its disks.
    pub(super) fn as_asked(&self, disks: &[&KeptDisk]) -> SocketConfig {
        let mut asked = self.asked.clone();
        let is_same = asked.controller.disks.len() == disks.len()
            && asked.controller.disks.iter().zip(disks).all(|(one, kept)| one.disk == kept.disk);
        // What was never changed stays as it was asked for.
        if !is_same || !self.changing.is_empty() {
            asked.controller.disks = disks.iter().map(|kept| kept.config()).collect();
        }
        asked
    }

    /// The disk of a namespace that the guest has seen like this.
    pub(super) fn disk_of(&self, seen: &SeenNamespace) -> Option<&KeptDisk> {
        self.disks.iter().find(|kept| {
            (kept.nsid, kept.uuid) == (seen.nsid, seen.uuid)
                && (kept.blocks, kept.read_only) == (seen.blocks, seen.read_only)
        })
    }
}

impl KeptDisk {
    /// What its item is called.
    pub(super) fn key(&self) -> &str {
        &self.key
    }

    /// How it is asked for.
    pub(super) fn config(&self) -> DiskConfig {
        DiskConfig { disk: self.disk.clone(), uuid: Some(self.uuid), nsid: Some(self.nsid) }
    }
}

/// The way to what the keeper holds. It is there before any disk is opened.
pub(super) struct Keeping {
    kept: Arc<Kept>,
    fence: OwnedFd,
}

/// What the keeper holds, for all who change it.
pub(super) struct Kept {
    store: Store,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// It holds something of which the next process can make use.
    is_possible: bool,
    /// Everything is there.
    is_complete: bool,
    /// What is served is not what the configuration says.
    is_changed: bool,
    controllers: BTreeMap<usize, KeptController>,
    /// Files of a client's memory that it holds apart from the client's record, by controller.
    files: BTreeMap<usize, BTreeSet<String>>,
    /// Controllers whose socket is not there yet.
    coming: BTreeMap<usize, KeptController>,
    /// How many disks there have been.
    disks: u64,
}

impl Keeping {
    /// # Errors
    /// The system has no more descriptors.
    pub(super) fn new(link: &WorkerLink) -> io::Result<Self> {
        let kept = Kept { store: link.store()?, state: Mutex::default() };
        Ok(Self { kept: Arc::new(kept), fence: shadowbell_backend::fence()? })
    }

    /// From here on the keeper holds what the next process needs, to be [completed]. If that can
    /// not be had, the log says so, and the service is as good as without. `is_changed`: what is
    /// served is not what the configuration says.
    ///
    /// [completed]: Keeping::complete
    pub(super) fn begin(
        &self,
        controllers: &[Arc<ServedController>],
        reactor: &mut Reactor,
        ports: &[PortId],
        is_changed: bool,
    ) {
        let outcome = self.keep_all(controllers, reactor, ports);
        let mut state = self.kept.state.lock();
        (state.is_possible, state.is_changed) = (outcome.is_ok(), is_changed);
        drop(state);
        if let Err(why) = outcome {
            self.kept.give_up(&why);
        }
    }

    /// As [`begin`](Self::begin), for controllers that come [one by one](Self::keep_one).
    ///
    /// # Errors
    /// The keeper does not take it.
    pub(super) fn begin_with_none(&self, is_changed: bool) -> anyhow::Result<()> {
        self.kept.store.begin((FENCE, self.fence.as_fd()))?;
        let mut state = self.kept.state.lock();
        (state.is_possible, state.is_changed) = (true, is_changed);
        Ok(())
    }

    /// Holds one more controller, which comes from another process.
    ///
    /// # Errors
    /// It can not be had.
    pub(super) fn keep_one(
        &self,
        served: &ServedController,
        reactor: &mut Reactor,
        port: PortId,
    ) -> anyhow::Result<()> {
        let kept = self.kept.keep_controller(served)?;
        self.kept.state.lock().controllers.insert(served.index, kept);
        reactor.record_with(port, self.kept.port_recorder(served.index));
        Ok(())
    }

    /// What the keeper holds counts for the controllers that it holds so far, which are at rest.
    ///
    /// # Errors
    /// It is not there: whoever goes on after this process's death would not know of them.
    pub(super) fn name_all(&self) -> anyhow::Result<()> {
        self.kept.state.lock().is_complete = true;
        self.kept.try_publish().context("the keeper does not take what it is to hold")
    }

    /// What the keeper holds is all that there is: the next process may go on with it.
    pub(super) fn complete(&self) {
        self.kept.state.lock().is_complete = true;
        self.kept.publish();
    }

    /// What the keeper holds, for whoever changes what is served.
    pub(super) fn kept(&self) -> Arc<Kept> {
        Arc::clone(&self.kept)
    }

    fn keep_all(
        &self,
        controllers: &[Arc<ServedController>],
        reactor: &mut Reactor,
        ports: &[PortId],
    ) -> anyhow::Result<()> {
        // What is known to be impossible costs nobody anything.
        for disk in controllers.iter().flat_map(|served| served.disks()) {
            disk.keep(&mut Descriptors::default())?;
        }
        self.kept.store.begin((FENCE, self.fence.as_fd()))?;
        controllers
            .iter()
            .zip(ports)
            .try_for_each(|(served, port)| self.keep_one(served, reactor, *port))
    }
}

impl Kept {
    /// Holds a controller that is about to be served, as [`port_recorder`](Self::port_recorder)
    /// says. Whether that can be had; if not, there is nothing any more for the next process.
    pub(super) fn add(self: &Arc<Self>, served: &ServedController) -> bool {
        if !self.is_possible() {
            return false;
        }
        match self.keep_controller(served) {
            Ok(kept) => {
                self.state.lock().coming.insert(served.index, kept);
                true
            }
            Err(why) => {
                self.give_up(&why);
                false
            }
        }
    }

    /// Keeps the socket of a controller, and names the controller as soon as it has it.
    pub(super) fn port_recorder(self: &Arc<Self>, index: usize) -> Box<dyn PortRecorder> {
        Box::new(PortRecord { kept: Arc::clone(self), index })
    }

    /// A controller is about to go: it is named no more.
    pub(super) fn will_remove(&self, index: usize) {
        let mut state = self.state.lock();
        state.controllers.remove(&index);
        state.coming.remove(&index);
        state.is_changed = true;
        drop(state);
        self.publish();
    }

    /// It has gone, with these namespaces.
    pub(super) fn removed(&self, index: usize, disks: &[KeptDisk]) {
        if self.is_possible() {
            let own = [transfer::controller(index), transfer::port(index)];
            let files = self.state.lock().files.remove(&index).unwrap_or_default();
            for key in own.iter().chain(&files).chain(disks.iter().map(|disk| &disk.key)) {
                let _ = self.store.delete(key);
            }
        }
    }

    /// The disks of a controller.
    pub(super) fn disks(&self, index: usize) -> Vec<KeptDisk> {
        let state = self.state.lock();
        state.controllers.get(&index).map(|kept| kept.disks.clone()).unwrap_or_default()
    }

    /// A namespace is about to be on this disk, or to go: until [`settle`](Self::settle) that is
    /// as likely as that it stays what it is.
    pub(super) fn will_change(
        &self,
        index: usize,
        nsid: u32,
        after: Option<(&DiskConfig, &NamespaceConfig)>,
    ) {
        if !self.is_possible() {
            return;
        }
        let after = after.map(|(disk, config)| self.keep_disk(index, nsid, &disk.disk, config));
        let after = match after.transpose() {
            Ok(after) => after,
            Err(why) => return self.give_up(&why),
        };
        let mut state = self.state.lock();
        if let Some(kept) = state.controllers.get_mut(&index) {
            kept.changing.push(nsid);
            let _ = after.map(|disk| kept.disks.insert(0, disk));
        }
        state.is_changed = true;
        drop(state);
        self.publish();
    }

    /// The change has come to its end: it was `done`, or all is as it was. The controller is as
    /// `asked` for now.
    pub(super) fn settle(&self, index: usize, nsid: u32, done: bool, asked: &SocketConfig) {
        let mut gone = Vec::new();
        let mut state = self.state.lock();
        if let Some(kept) = state.controllers.get_mut(&index) {
            kept.asked = asked.clone();
            kept.changing.retain(|other| *other != nsid);
            let is_there = nsids(&asked.controller.disks).any(|other| other == nsid);
            let (of_it, others): (Vec<_>, Vec<_>) =
                kept.disks.drain(..).partition(|disk| disk.nsid == nsid);
            kept.disks = others;
            // The new one is the first of two.
            let stays = if done { of_it.first() } else { of_it.last() };
            let stays = stays.filter(|_| is_there).cloned();
            gone = of_it;
            gone.retain(|disk| stays.as_ref().is_none_or(|stays| stays.key != disk.key));
            kept.disks.extend(stays);
        }
        drop(state);
        self.publish();
        if self.is_possible() {
            gone.iter().for_each(|disk| drop(self.store.delete(&disk.key)));
        }
    }

    /// A namespace is asked for by `spec` from here on, and a controller as `asked`.
    pub(super) fn say_otherwise(
        &self,
        index: usize,
        nsid: u32,
        spec: String,
        asked: &SocketConfig,
    ) {
        let mut state = self.state.lock();
        if let Some(kept) = state.controllers.get_mut(&index) {
            kept.asked = asked.clone();
            if let Some(disk) = kept.disks.iter_mut().find(|disk| disk.nsid == nsid) {
                disk.disk = spec;
            }
        }
        drop(state);
        self.say_again();
    }

    /// A controller is asked for like this from here on, with the same disks.
    pub(super) fn ask_otherwise(&self, index: usize, asked: &SocketConfig) {
        let mut state = self.state.lock();
        if let Some(kept) = state.controllers.get_mut(&index) {
            kept.asked = asked.clone();
        }
        drop(state);
        self.say_again();
    }

    /// What is not of a controller has changed.
    pub(super) fn say_again(&self) {
        self.state.lock().is_changed = true;
        self.publish();
    }

    fn is_possible(&self) -> bool {
        self.state.lock().is_possible
    }

    /// The next process can make no use of what the keeper holds.
    fn give_up(&self, why: &anyhow::Error) {
        info!("if this process dies, its clients lose their controllers: {why:#}");
        self.state.lock().is_possible = false;
        // Not what a process before has left, either.
        let _ = self.store.delete(COMPLETE);
    }

    /// Whether the next process could go on with what the keeper holds.
    pub(super) fn holds_all(&self) -> bool {
        let state = self.state.lock();
        state.is_possible && state.is_complete
    }

    /// Names all that there is.
    fn publish(&self) {
        // The store says itself what it could not take.
        let _ = self.try_publish();
    }

    fn try_publish(&self) -> io::Result<()> {
        let state = self.state.lock();
        if !state.is_possible || !state.is_complete {
            return Ok(());
        }
        let controllers: Vec<_> = state.controllers.values().cloned().collect();
        let complete = Complete {
            version: VERSION,
            served: transfer::served_of(controllers.iter().map(|kept| &kept.asked)),
            is_changed: state.is_changed,
            controllers,
            groups: limits::groups(),
        };
        // Under the lock, so that what comes later stays.
        self.store.put_state(COMPLETE, &complete, &Descriptors::default())
    }

    fn keep_controller(
        self: &Arc<Self>,
        served: &ServedController,
    ) -> anyhow::Result<KeptController> {
        let index = served.index;
        let asked = served.asked();
        let mut disks = Vec::new();
        let namespaces = served.controller.namespaces();
        for ((nsid, config), disk) in namespaces.iter().zip(&asked.controller.disks) {
            disks.push(self.keep_disk(index, *nsid, &disk.disk, config)?);
        }
        let recorder = Record { store: self.store.clone(), key: transfer::controller(index) };
        served.controller.record_with(Arc::new(recorder))?;
        Ok(KeptController { index, asked: (*asked).clone(), disks, changing: Vec::new() })
    }

    fn keep_disk(
        &self,
        index: usize,
        nsid: u32,
        spec: &str,
        config: &NamespaceConfig,
    ) -> anyhow::Result<KeptDisk> {
        let nth = {
            let mut state = self.state.lock();
            state.disks += 1;
            state.disks
        };
        let key = format!("disk/{index}.{nth}");
        put_disk(&self.store, &key, &*config.disk)?;
        let (store, weak) = (self.store.clone(), Arc::downgrade(&config.disk));
        let named = key.clone();
        config.disk.on_change(Box::new(move || {
            if let Some(disk) = weak.upgrade() {
                // The store says itself what it could not take.
                let _ = put_disk(&store, &named, &*disk);
            }
        }));
        let info = config.disk.info();
        let (disk, uuid) = (spec.to_owned(), config.uuid);
        Ok(KeptDisk { key, nsid, disk, uuid, blocks: info.blocks, read_only: info.read_only })
    }
}

fn put_disk(store: &Store, key: &str, disk: &dyn Disk) -> anyhow::Result<()> {
    let mut fds = Descriptors::default();
    let state = disk.keep(&mut fds)?;
    Ok(store.put_state(key, &state, &fds)?)
}

/// Puts there what is written down of a controller.
struct Record {
    store: Store,
    key: String,
}

impl Recorder for Record {
    fn record(&self, state: &SavedController, fds: Descriptors) {
        // The store says itself what it could not take.
        let _ = self.store.put_state(&self.key, state, &fds);
    }
}

/// The same of a socket.
struct PortRecord {
    kept: Arc<Kept>,
    index: usize,
}

impl PortRecord {
    /// Lasting descriptors are items of their own, and change together with what names them.
    fn put(&self, state: &SavedPort, fds: &mut Descriptors) {
        let body = match serde_json::to_vec(state) {
            Ok(body) => body,
            Err(error) => return self.kept.give_up(&error.into()),
        };
        let (mut put, mut removed) = (Vec::new(), Vec::new());
        for change in fds.take_changes() {
            match change {
                LastingChange::Put(number, fd) => {
                    put.push((transfer::client_file(self.index, number), fd));
                }
                LastingChange::Remove(number) => {
                    removed.push(transfer::client_file(self.index, number));
                }
            }
        }
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let files: Vec<_> = put.iter().map(|(key, fd)| (key, [fd.as_fd()])).collect();
        let key = transfer::port(self.index);
        let port = Change::Put { key: &key, body: &body, fds: &fds };
        let files = files.iter().map(|(key, fds)| Change::Put { key, body: &[], fds });
        let gone = removed.iter().map(|key| Change::Delete { key });
        let changes: Vec<_> = gone.chain(files).chain([port]).collect();
        // The store says itself what it could not take.
        let _ = self.kept.store.change(&changes);
        drop(changes);
        let mut state = self.kept.state.lock();
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
        let mut state = self.kept.state.lock();
        if let Some(coming) = state.coming.remove(&self.index) {
            state.controllers.insert(self.index, coming);
            state.is_changed = true;
            drop(state);
            self.kept.publish();
        }
    }
}
