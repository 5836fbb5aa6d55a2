//! Environment of a controller's control plane: configuration, namespaces and I/O threads.

use crate::config::Config;
use crate::event::Listener;
use crate::lba_status::LbaStatusServer;
use crate::namespace::{Namespace, Namespaces};
use crate::notice::{ControlHandle, Latch, Notice};
use crate::pool::PoolPort;
use crate::route::Route;
use crate::saved::{SavedGuarantees, SavedNamespace, SavedShape};
use crate::shared::ControllerShared;
use crate::trace::Kind;
use crate::worker::Pool;
use crate::worker::mailbox::Message;
use parking_lot::Mutex;
use shadowbell_spec::regs::CC_CSS_ALL;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Two sets of namespaces: one that I/O threads serve, and one that Identify reports. They differ
/// while a namespace is being changed.
struct Views {
    serving: Arc<Namespaces>,
    identified: Arc<Namespaces>,
}

/// Environment of a controller's control plane. Only the namespaces and the selected command sets
/// ever change.
pub(crate) struct Context {
    /// Configuration with an empty namespace list.
    pub(crate) config: Config,
    namespaces: Mutex<Views>,
    /// True if the host selected all I/O command sets, not only the NVM command set.
    all_command_sets: AtomicBool,
    pub(crate) shared: Arc<ControllerShared>,
    pub(crate) pool: Pool,
    /// Message routing for queues that moved to another I/O thread.
    pub(crate) route: Route,
    /// Handle by which I/O threads send notices to the control plane.
    pub(crate) control: ControlHandle,
    /// Get LBA Status commands in flight.
    pub(crate) lba_status: Arc<LbaStatusServer>,
    pub(crate) listener: Option<Listener>,
}

impl Context {
    /// Context of a controller that starts with `namespaces`.
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
            // The configuration must not keep a removed namespace's disk alive, so its list is
            // empty.
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

    /// Namespaces as the I/O threads serve them.
    pub(crate) fn serving(&self) -> Arc<Namespaces> {
        Arc::clone(&self.namespaces.lock().serving)
    }

    /// Namespaces as Identify reports them.
    pub(crate) fn identified(&self) -> Arc<Namespaces> {
        Arc::clone(&self.namespaces.lock().identified)
    }

    /// Namespaces that the I/O threads serve and whose command set the host has selected.
    pub(crate) fn visible(&self) -> Arc<Namespaces> {
        self.serving().visible(self.all_command_sets.load(Ordering::Relaxed))
    }

    /// Namespaces that Identify reports and whose command set the host has selected.
    pub(crate) fn identified_and_visible(&self) -> Arc<Namespaces> {
        self.identified().visible(self.all_command_sets.load(Ordering::Relaxed))
    }

    /// Stores the host's selection of I/O command sets (CC.CSS).
    pub(crate) fn select_command_sets(&self, css: u8) {
        self.all_command_sets.store(css == CC_CSS_ALL, Ordering::Relaxed);
    }

    /// Sets the namespaces for I/O threads that start serving the controller after this call.
    pub(crate) fn serve(&self, namespaces: Arc<Namespaces>) {
        self.namespaces.lock().serving = namespaces;
    }

    /// Sets the namespaces that Identify reports.
    pub(crate) fn identify(&self, namespaces: Arc<Namespaces>) {
        self.namespaces.lock().identified = namespaces;
    }

    /// Creates a latch. When the last I/O thread has dropped its clone, `notice` is sent.
    pub(crate) fn latch(&self, notice: Notice) -> Latch {
        Latch::new(self.control.clone(), notice)
    }

    /// Sends a message about this controller to each I/O thread in `workers`. `message` creates the
    /// message for the controller's identifier.
    pub(crate) fn send_all(
        &self,
        workers: impl IntoIterator<Item = usize>,
        message: impl Fn(u32) -> Message,
    ) {
        for worker in workers {
            self.send(worker, message(self.shared.id));
        }
    }

    /// Sends a message about this controller to I/O thread `worker`. If the queues of `worker` have
    /// moved, sends it to the I/O thread that serves them now.
    pub(crate) fn send(&self, worker: usize, message: Message) {
        self.route.send(&self.pool, worker, message);
    }

    /// True if the controller reports a volatile write cache to its host.
    pub(crate) fn has_volatile_cache(&self) -> bool {
        self.namespaces.lock().serving.guarantees.volatile_cache
    }

    /// Host-visible part of the configuration.
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
            guarantees: Some(SavedGuarantees {
                highest_nsid: namespaces.highest(),
                volatile_cache: namespaces.guarantees.volatile_cache,
                zeroes: namespaces.guarantees.zeroes,
            }),
        }
    }

    /// Adds an event to the trace.
    pub(crate) fn trace(&self, kind: Kind, qid: u16, value: u32, extra: u32) {
        self.pool.trace_control(kind, self.shared.id, qid, value, extra);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // A dedicated I/O thread serves no other controller, so it is returned to the thread pool.
        if let Some(worker) = self.route.target().filter(|worker| *worker >= self.pool.len()) {
            self.pool.release_claimed(worker);
        }
    }
}
