//! Stands for what controllers and sockets will do: be recorded while they work. Until they do,
//! nothing is complete, and nobody goes on with it.
#![allow(dead_code, reason = "until they do")]

use shadowbell_controller::{Controller, RestoreError, SavedController};
use shadowbell_state::Descriptors;
use shadowbell_vfio_user::Reactor;
use shadowbell_vfio_user::server::{PortId, SavedPort};
use std::io;
use std::sync::Arc;

pub(super) trait Recorder: Send + Sync {
    fn record(&self, state: &SavedController, fds: Descriptors);
}

pub(super) trait PortRecorder: Send {
    fn record(&mut self, state: &SavedPort, fds: Descriptors);
}

pub(super) trait RecordController {
    fn record_with(&self, recorder: Arc<dyn Recorder>) -> io::Result<()>;
    fn recover(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<usize, RestoreError>;
}

impl RecordController for Controller {
    fn record_with(&self, _: Arc<dyn Recorder>) -> io::Result<()> {
        Err(io::Error::other("not in this release"))
    }
    fn recover(&self, _: &SavedController, _: &mut Descriptors) -> Result<usize, RestoreError> {
        Ok(0)
    }
}

pub(super) trait RecordPort {
    fn record_with(&mut self, port: PortId, recorder: Box<dyn PortRecorder>);
}

impl RecordPort for Reactor {
    fn record_with(&mut self, _: PortId, _: Box<dyn PortRecorder>) {}
}
