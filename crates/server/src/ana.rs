//! Changes of ANA states while hosts use the controllers.

use super::reconfigure::Changes;
use super::registry::ServedController;
use anyhow::anyhow;
use shadowbell_config::ana_state::AnaStateName;
use shadowbell_process::exit;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;
use tracing::info;

/// Time limit for the completion of earlier commands on the namespaces of a group after a change of
/// its ANA state.
const IN_PROGRESS: Duration = Duration::from_secs(30);

impl Changes {
    /// Sets the ANA state of a group for a controller. Returns false if the group has that state
    /// already.
    ///
    /// # Errors
    /// The controller or the group does not exist, or commands in flight take too long.
    pub(super) fn set_ana(
        &self,
        id: &str,
        group: u32,
        state: AnaStateName,
    ) -> anyhow::Result<bool> {
        let _guard = self.change_lock();
        let served = self.find(id)?;
        self.apply_ana_state(&served, group, state)
    }

    /// Like [`set_ana`](Self::set_ana), for a caller that holds the change lock.
    ///
    /// The checkpoint is updated before the controller, so that after a crash the next process
    /// has the new state and reports it to the host.
    ///
    /// # Errors
    /// As for [`set_ana`](Self::set_ana).
    pub(super) fn apply_ana_state(
        &self,
        served: &ServedController,
        group: u32,
        state: AnaStateName,
    ) -> anyhow::Result<bool> {
        let mut requested = (*served.requested()).clone();
        let Some(membership) = &mut requested.controller.subsystem else {
            return Err(exit::conflict(anyhow!(
                "{} belongs to no subsystem, so it has no ANA groups",
                served.name
            )));
        };
        let count = membership.ana.count();
        if !(1..=count).contains(&group) {
            return Err(exit::not_found(anyhow!(
                "the subsystem {} has ANA groups 1 to {count}, not {group}",
                membership.name
            )));
        }
        if membership.ana.state(group) == state {
            return Ok(false);
        }
        membership.ana.set(group, state);
        if let Some(checkpoint) = self.checkpoint() {
            checkpoint.set_config(served.index, &requested);
        }
        served.set_requested(requested);
        let (ends, end) = channel();
        served.controller.set_ana_state(group, state.into(), move || {
            let _ = ends.send(());
        });
        info!("{}: ANA group {group} is {state}", served.name);
        match end.recv_timeout(IN_PROGRESS) {
            // The channel is closed without a message if the controller was removed.
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Ok(true),
            Err(RecvTimeoutError::Timeout) => Err(anyhow!(
                "ANA group {group} of {} is {state} for new commands, but earlier commands in \
                 flight did not end within {} s",
                served.name,
                IN_PROGRESS.as_secs()
            )),
        }
    }
}
