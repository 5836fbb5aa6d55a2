//! Checkpoint sink of a port, for crash recovery.

use shadowbell_state::Descriptors;

use super::saved::SavedPort;

/// Checkpoint sink of a device and its client: after a crash of this process, the next one
/// continues from the last checkpoint ([`Reactor::restore`](super::Reactor::restore)).
pub trait PortRecorder: Send {
    /// Stores a checkpoint, which replaces the previous one; `fds` are the descriptors that `state`
    /// refers to. Replies that depend on the change are sent after this returns. Called on the
    /// reactor's thread, for infrequent changes (not for reads, nor for writes to the first
    /// region).
    fn record(&mut self, state: &SavedPort, fds: Descriptors);
}
