//! Watchdog actions for an attached controller.

use super::reset::{handle_removal, reset};
use super::stats::count;
use super::watchdog::WatchedController;
use crate::admin::{AdminCommands, LogRequest, identify_namespaces, read_log_page};
use crate::attached_controller::AttachedController;
use crate::controller_state::Condition;
use crate::transport::TransportError;
use shadowbell_spec::log::{ChangedNamespaces, lid};

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
        // Sleeping queues are woken in any case, so that they notice a change of the state.
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
