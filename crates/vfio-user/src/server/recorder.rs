//! Interface for storing checkpoints of a port (a device and its client), for crash recovery.

use shadowbell_state::Descriptors;

use super::saved::SavedPort;

/// Storage for the checkpoints of a device and its client. After a crash of this process, the next
/// one continues from the last checkpoint ([`RestoredPort`](super::RestoredPort)).
pub trait PortRecorder: Send {
    /// Stores a checkpoint, which replaces the previous one. `fds` are the descriptors to which
    /// `state` refers. Replies that depend on the stored state are sent after this method returns.
    /// The method is called on the reactor's thread, only for infrequent changes: not for reads,
    /// and not for writes to BAR0.
    fn record(&mut self, state: &SavedPort, fds: Descriptors);
}
