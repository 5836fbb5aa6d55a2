//! Whoever keeps what a port is, in case that this process dies.

use shadowbell_state::Descriptors;

use super::saved::SavedPort;

/// Keeps what a device and its client are while they are served, in case that this process dies:
/// another process goes on from what was recorded last
/// ([`Reactor::restore`](super::Reactor::restore)).
pub trait PortRecorder: Send {
    /// The port is this, as of now; `fds` are the descriptors that `state` names. The client gets
    /// no answer to what has changed before this returns. It is called on the reactor's thread, for
    /// what happens seldom (not for reads, nor for writes behind the first region).
    fn record(&mut self, state: &SavedPort, fds: Descriptors);
}
