//! Work that is deferred until the control plane's lock is released.

use crate::event::Event;
use crate::notice::Latch;

/// Callback of an external caller, run on any thread without the lock.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// Work that is deferred until the control plane's lock is released.
#[derive(Default)]
#[must_use = "pass it to ControllerInner::run"]
pub(crate) struct Deferred {
    pub(crate) events: Vec<Event>,
    /// Latches to drop. The last drop sends a notice, which may take the lock.
    pub(crate) latches: Vec<Latch>,
    pub(crate) callbacks: Vec<Callback>,
}

impl Deferred {
    pub(crate) fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}
