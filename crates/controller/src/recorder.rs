//! Whoever keeps what a controller is, in case that this process dies.

use crate::saved::SavedController;
use shadowbell_state::Descriptors;

/// Keeps what a controller is while it works, in case that this process dies: another process goes
/// on from what was recorded last ([`Controller::recover`](crate::Controller::recover)).
pub trait Recorder: Send + Sync {
    /// The controller is this, as of now; `fds` are the descriptors that `state` names. The host
    /// sees nothing of what has changed before this returns. It is called for what happens seldom
    /// (registers, admin commands), on the thread that brings it: it should not take longer than
    /// some ten microseconds.
    fn record(&self, state: &SavedController, fds: Descriptors);
}
