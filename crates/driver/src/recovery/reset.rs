//! Controller reset, failure of the controller, and watchdog actions for an attached controller.

use super::policy::count;
use super::watchdog::WatchedController;
use crate::admin::{AdminCommands, LogRequest, identify_namespaces, read_log_page};
use crate::attached_controller::AttachedController;
use crate::configure::reconfigure;
use crate::controller_state::{Condition, Phase};
use crate::device::StateError;
use crate::io_queues::IoQueueTable;
use crate::transport::TransportError;
use shadowbell_spec::log::{ChangedNamespaces, lid};

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
/// If the controller cannot be disabled, the transport resets the PCI function. With `thoroughly`,
/// the transport does so in any case.
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

impl WatchedController for AttachedController {
    fn tick(&self) -> bool {
        self.state().tick();
        self.wake_sleepers();
        let is_due = self.take_long_running() | self.take_faults();
        read_events(self);
        is_due
    }

    fn check_status(&self) -> bool {
        let is_attached = check_status(self);
        // Sleeping queues are woken whatever the result is, so that they notice a change of the
        // state.
        self.wake_sleepers();
        is_attached
    }
}

/// Reads CSTS, and resets or fails the controller if needed. Returns false to end the watchdog.
pub(crate) fn check_status(controller: &AttachedController) -> bool {
    let state = controller.state();
    let generation = state.generation();
    match state.condition() {
        Condition::Live => {}
        Condition::Resetting => return true,
        Condition::Detached | Condition::Failed { .. } => return false,
    }
    let name = controller.name();
    match controller.plane().device.csts() {
        Err(error @ TransportError::Disconnected { .. }) => {
            handle_removal(controller, &error.to_string())
        }
        Err(error) => tracing::debug!("the status of {name} was not read: {error}"),
        Ok(csts) if csts.into_bits() == u32::MAX => {
            handle_removal(
                controller,
                &format!("{name} was removed (its registers read as all ones)"),
            );
        }
        Ok(csts) if csts.cfs() => {
            count(&controller.counters.fatal, 1);
            reset(controller, generation, "it reports a fatal status (CSTS.CFS)");
        }
        Ok(csts) if csts.nssro() && !controller.enabled.is_nssro_stuck() => {
            count(&controller.counters.subsystem_resets, 1);
            reset(controller, generation, "its NVM subsystem was reset (CSTS.NSSRO)");
        }
        Ok(csts) if !csts.rdy() => {
            reset(controller, generation, "it is disabled, but not by this driver (CSTS.RDY)");
        }
        Ok(_) => {}
    }
    true
}

/// Takes asynchronous events. If a namespace has changed, identifies the namespaces again.
pub(crate) fn read_events(controller: &AttachedController) {
    if controller.state().condition() == Condition::Live
        && controller.plane().queue.poll_namespaces_changed()
    {
        read_namespaces(controller);
    }
}

/// Identifies the namespaces again, and stores them until the program takes them.
fn read_namespaces(controller: &AttachedController) {
    let info = &controller.info;
    // The host must read the changed namespace list to unmask the event for the next change.
    let list = LogRequest::new(lid::CHANGED_ATTACHED_NAMESPACES, size_of::<ChangedNamespaces>());
    let read = read_log_page(controller, list)
        .and_then(|_| identify_namespaces(controller, &info.identity, info.max_transfer));
    match read {
        Ok(namespaces) => {
            count(&controller.counters.namespaces_read, 1);
            tracing::info!("the namespaces of {} changed, and were read again", controller.name());
            controller.set_changed_namespaces(namespaces);
        }
        Err(error) => tracing::warn!("the namespaces changed, but could not be read: {error}"),
    }
}
