//! What has to be done after the control plane's lock was let go.

use crate::event::Event;
use crate::latch::Latch;

/// Somebody outside who waits for something: it runs on any thread, without the lock.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// What has to be done after the control plane's lock was let go.
#[derive(Default)]
#[must_use = "pass it to ControllerInner::run"]
pub(crate) struct Deferred {
    pub(crate) events: Vec<Event>,
    /// A latch gives notice, which may take the lock.
    pub(crate) latches: Vec<Latch>,
    pub(crate) callbacks: Vec<Callback>,
}

impl Deferred {
    pub(crate) fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}
