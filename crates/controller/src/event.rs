//! Controller events that the owner of a controller may log.

use std::time::Duration;

/// Event of a controller that its owner may want to log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A host set CC.EN, and the controller is ready.
    Enabled,
    /// The host configured shadow doorbells.
    ShadowDoorbells,
    /// The host created an I/O queue. The value is the number of existing submission queues.
    QueueCreated(usize),
    /// A write failed because the storage of the namespace with this NSID is full. Rate-limited.
    Full(u32),
    /// Data written to the namespace with this NSID may be lost. Rate-limited.
    WritesLost(u32),
    /// The controller moves to a dedicated I/O thread, because its passes delayed other controllers
    /// on the same I/O thread. The value is the duration of the last pass.
    Isolated(Duration),
    /// The host shut the controller down.
    Shutdown,
    /// The controller was reset, and no command is in flight.
    Disabled,
    /// The controller is in a fatal state (CSTS.CFS) until a reset. The text is the reason.
    Fatal(&'static str),
}

/// Callback for events. It runs on the thread on which the event occurs.
pub(crate) type Listener = Box<dyn Fn(&Event) + Send + Sync>;
