//! Controller events for the owner of a controller, for example for a log.

use std::time::Duration;

/// Event of a controller that its owner may want to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A host set CC.EN, and the controller is ready.
    Enabled,
    /// The host configured shadow doorbells.
    ShadowDoorbells,
    /// The host created an I/O queue: number of submission queues that now exist.
    QueueCreated(usize),
    /// A write failed because the storage of this namespace (NSID) is full. Rate-limited.
    Full(u32),
    /// Data written to this namespace (NSID) may be lost. Rate-limited.
    Lost(u32),
    /// The controller's passes took too long for other controllers on the same I/O thread, the
    /// last one this long: the controller moves to a dedicated I/O thread.
    Isolated(Duration),
    /// The host shut the controller down.
    Shutdown,
    /// The controller was reset, and no command is in flight.
    Disabled,
    /// The controller is in a fatal state (CSTS.CFS) until a reset, for this reason.
    Fatal(&'static str),
}

/// Callback for events. Called on the thread that causes the event.
pub(crate) type Listener = Box<dyn Fn(&Event) + Send + Sync>;
