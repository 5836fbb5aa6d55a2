//! Controller reset, and failure of the controller.

use super::stats::count;
use crate::admin::AdminCommands;
use crate::attached_controller::AttachedController;
use crate::configure::reconfigure;
use crate::controller_state::{Condition, Phase};
use crate::device::StateError;
use crate::io_queues::IoQueueTable;
use crate::transport::TransportError;

/// Number of attempts of a reset.
const TRIES: u32 = 5;

/// Failure of an attempt to reset the controller.
enum ResetError {
    /// The controller was removed or is unreachable.
    Removed(String),
    /// Another failure: a further attempt may succeed.
    Other(String),
}

impl From<StateError> for ResetError {
    fn from(error: StateError) -> Self {
        match error {
            StateError::Absent | StateError::Transport(TransportError::Disconnected { .. }) => {
                Self::Removed(error.to_string())
            }
            _ => Self::Other(error.to_string()),
        }
    }
}

/// Fails the controller because it was removed or is unreachable.
pub(crate) fn handle_removal(controller: &AttachedController, why: &str) {
    if controller.state().set_removed(Phase::Live, why) {
        count(&controller.counters.removed, 1);
        tracing::error!("{why}; all outstanding commands end");
        controller.plane().queue.fail_all();
    }
}

/// Resets the controller, unless another thread has already reset it since its generation was
/// `generation`. Afterwards the controller works or has failed.
pub(crate) fn reset(controller: &AttachedController, generation: u32, why: &str) {
    let (state, counters) = (controller.state(), &controller.counters);
    let (admin, name) = (controller.plane(), controller.name());
    let mut io_queues = controller.enabled.io_queues();
    if state.condition() != Condition::Live || state.generation() != generation {
        return;
    }
    state.begin_reset();
    count(&counters.resets, 1);
    tracing::warn!("{name}: {why}; resetting the controller");
    admin.queue.fail_all();
    io_queues.clear_live();
    let mut last = String::new();
    for attempt in 1..=TRIES {
        count(&counters.reset_tries, 1);
        match try_reset(controller, &mut io_queues, attempt > 1) {
            Ok(()) => {
                tracing::info!("{name} works again after a reset");
                return state.end_reset();
            }
            Err(ResetError::Removed(why)) => {
                let why = format!("{name} failed during a reset: {why}");
                count(&counters.removed, 1);
                tracing::error!("{why}; all outstanding commands end");
                state.set_removed(Phase::Resetting, &why);
                return admin.queue.fail_all();
            }
            Err(ResetError::Other(why)) => {
                tracing::warn!("{name}: reset, try {attempt} of {TRIES}: {why}");
                last = why;
            }
        }
    }
    count(&counters.failed, 1);
    let quiet = admin.device.disable().is_ok() || admin.device.transport.reset().is_ok();
    let why = format!("{name} failed, because it could not be reset ({last})");
    tracing::error!("{why}; all outstanding commands end");
    admin.queue.fail_all();
    state.set_unusable(&why, quiet);
}

/// Makes one attempt: resets a controller in any state, and sets up everything except I/O queues.
fn try_reset(
    controller: &AttachedController,
    io_queues: &mut IoQueueTable,
    thoroughly: bool,
) -> Result<(), ResetError> {
    let admin = controller.plane();
    let transport = &admin.device.transport;
    let other = |error: TransportError| ResetError::Other(error.to_string());
    match admin.device.disable() {
        Ok(()) if !thoroughly => {}
        Ok(()) => {
            if let Err(error) = transport.reset() {
                tracing::debug!("{error}");
            }
        }
        Err(error) => {
            if let removed @ ResetError::Removed(_) = ResetError::from(error) {
                return Err(removed);
            }
            transport.reset().map_err(other)?;
        }
    }
    io_queues.release_quarantined();
    let no_room = || ResetError::Other("the admin queues have no room in memory".into());
    admin.device.enable(admin.restart().ok_or_else(no_room)?)?;
    controller.enabled.note_nssro();
    controller.enabled.reconnect_admin_interrupt().map_err(other)?;
    reconfigure(admin, &controller.info).map_err(ResetError::Other)
}
