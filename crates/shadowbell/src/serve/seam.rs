//! Stands for what sockets will do: be recorded while they work. Until they do, nothing is complete,
//! and nobody goes on with it.
#![allow(dead_code, reason = "until they do")]

use shadowbell_state::Descriptors;
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::{PortId, SavedPort};

/// Whether sockets are recorded.
pub(super) const ARE_RECORDED: bool = true;

pub(super) trait PortRecorder: Send {
    fn record(&mut self, state: &SavedPort, fds: Descriptors);
}

pub(super) trait RecordPort {
    fn record_with(&mut self, port: PortId, recorder: Box<dyn PortRecorder>);
}

impl RecordPort for Reactor {
    fn record_with(&mut self, _: PortId, _: Box<dyn PortRecorder>) {}
}
