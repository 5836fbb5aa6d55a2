//! What the control plane of a controller works with and does not change.

use crate::config::Config;
use crate::event::Listener;
use crate::latch::Latch;
use crate::namespace::Namespace;
use crate::notice::{ControlHandle, Notice};
use crate::route::Route;
use crate::saved::{SavedNamespace, SavedShape};
use crate::shared::ControllerShared;
use crate::trace::Kind;
use crate::worker::Pool;
use crate::worker::message::Message;
use std::sync::Arc;

/// What the control plane of a controller works with and does not change.
pub(crate) struct Context {
    pub(crate) config: Config,
    pub(crate) namespaces: Arc<Vec<Namespace>>,
    pub(crate) shared: Arc<ControllerShared>,
    pub(crate) pool: Pool,
    /// Which worker serves what was placed at another.
    pub(crate) route: Route,
    /// The way back here, for workers.
    pub(crate) control: ControlHandle,
    pub(crate) listener: Option<Listener>,
}

impl Context {
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

    /// Whether the storage of any namespace has no room, as far as that was noticed.
    pub(crate) fn is_any_full(&self) -> bool {
        self.namespaces.iter().any(|ns| ns.disk().is_full())
    }

    /// Whether any namespace has a volatile write cache.
    pub(crate) fn has_volatile_cache(&self) -> bool {
        self.namespaces.iter().any(|ns| ns.info().volatile_cache)
    }

    /// What the host sees of the configuration.
    pub(crate) fn shape(&self) -> SavedShape {
        let Config { serial, model, io_queues, max_queue_entries, mdts, shadow_doorbells, .. } =
            &self.config;
        let namespace = |ns: &Namespace| SavedNamespace {
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
            namespaces: self.namespaces.iter().map(namespace).collect(),
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
