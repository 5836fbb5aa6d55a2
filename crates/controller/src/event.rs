//! What happens to a controller that its owner may want to tell a person.

use std::time::Duration;

/// Something that the owner of a controller may want to tell a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A host set CC.EN, and the controller is ready.
    Enabled,
    /// The host configured shadow doorbells.
    ShadowDoorbells,
    /// The host created its first I/O queue, or another one: how many submission queues exist.
    QueueCreated(usize),
    /// A write found no room on the storage of this namespace: once in a while.
    Full(u32),
    /// Data that were written to this namespace may be lost: once in a while.
    Lost(u32),
    /// Its turns took too long for those that it shared a worker with, the last one this long: it
    /// is served by a thread of its own from now on.
    Isolated(Duration),
    /// The host has shut the controller down.
    Shutdown,
    /// The controller was reset; no command is in flight any more.
    Disabled,
    /// The controller can not go on until it is reset, and why.
    Fatal(&'static str),
}

/// Is called with what happens, on whatever thread it happens.
pub(crate) type Listener = Box<dyn Fn(&Event) + Send + Sync>;
