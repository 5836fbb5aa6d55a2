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

    /// Reports that the reactor begins the replay of a restored client: it handles the first
    /// message in the client's socket, which the previous process may have begun to handle when it
    /// died. Returns false if the replay has to wait; the reactor then tries again shortly.
    fn begin_replay(&mut self) -> bool {
        true
    }

    /// Reports the end of the replay (`is_done`: the message is handled, there was none, or the
    /// client has disconnected), or its interruption before the message was handled.
    fn end_replay(&mut self, is_done: bool) {
        let _ = is_done;
    }
}
