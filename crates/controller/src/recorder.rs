//! Checkpoint sink for crash recovery.

use crate::saved::SavedController;
use shadowbell_state::Descriptors;

/// Stores checkpoints of a running controller. If this process dies, the next process recovers the
/// controller from the last checkpoint ([`Controller::recover`](crate::Controller::recover)).
pub trait Recorder: Send + Sync {
    /// Stores a checkpoint; `fds` are the descriptors to which `state` refers. The host sees no
    /// change of the state before this method returns. The method is called for rare operations
    /// (registers, admin commands) on the thread that handles them, and should take at most about
    /// ten microseconds.
    fn record(&self, state: &SavedController, fds: Descriptors);
}
