//! What the control plane of a controller works with, and does not change but for its namespaces.

use crate::config::Config;
use crate::event::Listener;
use crate::latch::Latch;
use crate::lba_status::LbaStatusServer;
use crate::namespace::{Namespace, Namespaces};
use crate::notice::{ControlHandle, Notice};
use crate::pool::PoolPort;
use crate::route::Route;
use crate::saved::{SavedNamespace, SavedPromises, SavedShape};
use crate::shared::ControllerShared;
use crate::trace::Kind;
use crate::worker::Pool;
use crate::worker::message::Message;
use parking_lot::Mutex;
use shadowbell_spec::regs::CC_CSS_ALL;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The namespaces as workers serve them, and as the host is told of them: while one is changed, one
/// of the two is ahead.
struct Views {
    serving: Arc<Namespaces>,
    identified: Arc<Namespaces>,
}

/// What the control plane of a controller works with, and does not change but for its namespaces.
pub(crate) struct Context {
    /// Without its namespaces.
    pub(crate) config: Config,
    namespaces: Mutex<Views>,
    /// The host has selected all I/O command sets, not the NVM command set alone.
    all_command_sets: AtomicBool,
    pub(crate) shared: Arc<ControllerShared>,
    pub(crate) pool: Pool,
    /// Which worker serves what was placed at another.
    pub(crate) route: Route,
    /// The way back here, for workers.
    pub(crate) control: ControlHandle,
    /// Get LBA Status commands under way.
    pub(crate) lba_status: Arc<LbaStatusServer>,
    pub(crate) listener: Option<Listener>,
}

impl Context {
    /// For a controller of this configuration, which begins with these namespaces.
    pub(crate) fn new(
        config: Config,
        namespaces: Namespaces,
        shared: Arc<ControllerShared>,
        pool: Pool,
        control: ControlHandle,
        listener: Option<Listener>,
    ) -> Self {
        let (serving, identified) = match &config.pool {
            Some(pool) => {
                pool.connect(PoolPort(control.clone()));
                let (serving, identified) = namespaces.with_barred(&pool.state());
                (Arc::new(serving), Arc::new(identified))
            }
            None => {
                let all = Arc::new(namespaces);
                (Arc::clone(&all), all)
            }
        };
        let lba_status = Arc::new(LbaStatusServer::new(control.clone()));
        Self {
            // A disk that is removed is let go of.
            config: Config { namespaces: Vec::new(), nsids: Vec::new(), ..config },
            namespaces: Mutex::new(Views { serving, identified }),
            all_command_sets: AtomicBool::new(false),
            shared,
            pool,
            route: Route::default(),
            control,
            lba_status,
            listener,
        }
    }

    /// The namespaces as workers serve them.
    pub(crate) fn serving(&self) -> Arc<Namespaces> {
        Arc::clone(&self.namespaces.lock().serving)
    }

    /// The namespaces as the host is told of them.
    pub(crate) fn identified(&self) -> Arc<Namespaces> {
        Arc::clone(&self.namespaces.lock().identified)
    }

    /// As [`serving`](Self::serving), without those of command sets that the host has not selected.
    pub(crate) fn visible(&self) -> Arc<Namespaces> {
        self.serving().visible(self.all_command_sets.load(Ordering::Relaxed))
    }

    /// As [`identified`](Self::identified), likewise.
    pub(crate) fn identified_and_visible(&self) -> Arc<Namespaces> {
        self.identified().visible(self.all_command_sets.load(Ordering::Relaxed))
    }

    /// Which I/O command sets the host has selected (CC.CSS).
    pub(crate) fn select_command_sets(&self, css: u8) {
        self.all_command_sets.store(css == CC_CSS_ALL, Ordering::Relaxed);
    }

    /// Whoever serves the controller from here on serves these.
    pub(crate) fn serve(&self, namespaces: Arc<Namespaces>) {
        self.namespaces.lock().serving = namespaces;
    }

    /// The host is told of these.
    pub(crate) fn identify(&self, namespaces: Arc<Namespaces>) {
        self.namespaces.lock().identified = namespaces;
    }

    /// A latch that gives `notice` when the last worker has let go of it.
    pub(crate) fn latch(&self, notice: Notice) -> Latch {
        Latch::new(self.control.clone(), notice)
    }

    /// Sends a message about this controller to each of `workers`. It is made from the controller's
    /// identifier.
    pub(crate) fn send_all(
        &self,
        workers: impl IntoIterator<Item = usize>,
        message: impl Fn(u32) -> Message,
    ) {
        for worker in workers {
            self.send(worker, message(self.shared.id));
        }
    }

    /// Sends a message about this controller to whoever serves what was placed at `worker`.
    pub(crate) fn send(&self, worker: usize, message: Message) {
        self.route.send(&self.pool, worker, message);
    }

    /// Whether the controller has a volatile write cache for its host.
    pub(crate) fn has_volatile_cache(&self) -> bool {
        self.namespaces.lock().serving.promises.volatile_cache
    }

    /// What the host sees of the configuration.
    pub(crate) fn shape(&self) -> SavedShape {
        let Config { serial, model, io_queues, max_queue_entries, mdts, shadow_doorbells, .. } =
            &self.config;
        let namespaces = self.serving();
        let namespace = |ns: &Namespace| SavedNamespace {
            nsid: ns.nsid(),
            uuid: ns.uuid(),
            blocks: ns.blocks(),
            block_size: ns.info().block_size,
            read_only: ns.read_only(),
        };
        SavedShape {
            serial: serial.clone(),
            model: model.clone(),
            io_queues: *io_queues,
            max_queue_entries: *max_queue_entries,
            mdts: *mdts,
            shadow_doorbells: *shadow_doorbells,
            mapped_doorbells: self.shared.mapped,
            namespaces: namespaces.iter().map(namespace).collect(),
            told: Some(SavedPromises {
                highest_nsid: namespaces.highest(),
                volatile_cache: namespaces.promises.volatile_cache,
                zeroes: namespaces.promises.zeroes,
            }),
        }
    }

    /// Records something in the trace.
    pub(crate) fn trace(&self, kind: Kind, qid: u16, value: u32, extra: u32) {
        self.pool.trace_control(kind, self.shared.id, qid, value, extra);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Nobody else uses a worker that was claimed.
        if let Some(worker) = self.route.target().filter(|worker| *worker >= self.pool.len()) {
            self.pool.give_back(worker);
        }
    }
}
