//! Has the keeper hold what the next process needs, should this one die.
//!
//! Items: [`fence`](FENCE); `disk/N.M`, `controller/N` and `port/N` as at a hand-over, each with
//! descriptors of its own; and, when all of them are there, what is served.

use super::registry::ServedController;
use super::server_config::ServerConfig;
use super::store::Store;
use super::transfer::{self, Served};
use super::worker_link::WorkerLink;
use crate::items::COMPLETE;
use serde::{Deserialize, Serialize};
use shadowbell_backend::Disk;
use shadowbell_controller::{Recorder, SavedController};
use shadowbell_state::{Descriptors, VERSION};
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::{PortId, PortRecorder, SavedPort};
use std::cell::Cell;
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
}

/// The way to what the keeper holds. It is there before any disk is opened.
pub(super) struct Keeping {
    store: Store,
    fence: OwnedFd,
    is_possible: Cell<bool>,
}

impl Keeping {
    /// # Errors
    /// The system has no more descriptors.
    pub(super) fn new(link: &WorkerLink) -> std::io::Result<Self> {
        Ok(Self {
            store: link.store()?,
            fence: shadowbell_backend::fence()?,
            is_possible: Cell::new(false),
        })
    }

    /// From here on the keeper holds what the next process needs, to be [completed]. If that can
    /// not be had, the log says so, and the service is as good as without.
    ///
    /// [completed]: Keeping::complete
    pub(super) fn begin(
        &self,
        controllers: &[Arc<ServedController>],
        reactor: &mut Reactor,
        ports: &[PortId],
    ) {
        let outcome = self.keep_all(controllers, reactor, ports);
        self.is_possible.set(outcome.is_ok());
        if let Err(why) = outcome {
            info!("if this process dies, its clients lose their controllers: {why:#}");
            // Not what a process before has left, either.
            let _ = self.store.delete(COMPLETE);
        }
    }

    /// What the keeper holds is all that there is: the next process may go on with it.
    pub(super) fn complete(&self, config: &ServerConfig) {
        if self.is_possible.get() {
            let complete = Complete { version: VERSION, served: transfer::served(config) };
            // The store says itself what it could not take.
            let _ = self.store.put_state(COMPLETE, &complete, &Descriptors::default());
        }
    }

    /// What the keeper holds is not what is served any more: should this process die, another one
    /// serves what the configuration says, and clients lose their controllers.
    pub(super) fn forget(&self) {
        let _ = self.store.delete(COMPLETE);
    }

    /// The same, for another thread.
    pub(super) fn forgetter(&self) -> impl Fn() + Send + Sync + 'static {
        let store = self.store.clone();
        move || {
            let _ = store.delete(COMPLETE);
        }
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
        self.store.put(FENCE, &[], &[self.fence.as_fd()])?;
        for (index, served) in controllers.iter().enumerate() {
            for (nth, disk) in served.disks().enumerate() {
                self.keep_disk(transfer::disk(index, nth), &disk)?;
            }
            let key = transfer::controller(index);
            let recorder = Record { store: self.store.clone(), key };
            served.controller.record_with(Arc::new(recorder))?;
        }
        for (index, port) in ports.iter().enumerate() {
            let key = transfer::port(index);
            let recorder = Record { store: self.store.clone(), key };
            reactor.record_with(*port, Box::new(recorder));
        }
        Ok(())
    }

    fn keep_disk(&self, key: String, disk: &Arc<dyn Disk>) -> anyhow::Result<()> {
        put_disk(&self.store, &key, &**disk)?;
        let store = self.store.clone();
        let weak = Arc::downgrade(disk);
        disk.on_change(Box::new(move || {
            if let Some(disk) = weak.upgrade() {
                // The store says itself what it could not take.
                let _ = put_disk(&store, &key, &*disk);
            }
        }));
        Ok(())
    }
}

fn put_disk(store: &Store, key: &str, disk: &dyn Disk) -> anyhow::Result<()> {
    let mut fds = Descriptors::default();
    let state = disk.keep(&mut fds)?;
    Ok(store.put_state(key, &state, &fds)?)
}

/// Puts there what is written down of a controller or of a socket.
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

impl PortRecorder for Record {
    fn record(&mut self, state: &SavedPort, fds: Descriptors) {
        let _ = self.store.put_state(&self.key, state, &fds);
    }
}
