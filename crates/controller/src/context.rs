//! What the control plane of a controller works with and does not change.

use crate::config::Config;
use crate::event::Listener;
use crate::latch::Latch;
use crate::namespace::Namespace;
use crate::notice::{ControlHandle, Notice};
use crate::route::Route;
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
