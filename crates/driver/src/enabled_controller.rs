//! Enabled controller with an admin queue, and its shutdown.

use crate::admin::AdminPlane;
use crate::controller_state::{ControllerState, Phase};
use crate::device::Device;
use crate::error::{AttachError, DetachError};
use crate::io_queues::IoQueueTable;
use crate::options::AttachOptions;
use crate::transport::{Transport, TransportError};
use parking_lot::{Mutex, MutexGuard};
use shadowbell_memory::EventFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A controller from CC.EN until its shutdown. Dropping the value shuts the controller down.
pub(crate) struct EnabledController {
    pub(crate) admin: AdminPlane,
    pub(crate) state: ControllerState,
    io_queues: Mutex<IoQueueTable>,
    /// Eventfd that interrupt vector 0 signals.
    pub(crate) admin_event: Option<EventFd>,
    /// True if CSTS.NSSRO is set even after the driver has cleared it.
    nssro_stuck: AtomicBool,
}

impl EnabledController {
    /// Disables the controller, and enables it with new admin queues.
    pub(crate) fn enable(
        transport: Arc<dyn Transport>,
        options: &AttachOptions,
    ) -> Result<Self, AttachError> {
        let device = Device::probe(transport, options.page_size, options.timeouts)?;
        device.disable().map_err(|error| device.attach_error("disabling", error))?;
        let (admin, layout) = AdminPlane::new(device)?;
        // The value is created before the controller is enabled: if a later step fails, the drop of
        // the value disables the controller.
        let enabled = Self {
            admin,
            state: ControllerState::new(),
            io_queues: Mutex::default(),
            admin_event: None,
            nssro_stuck: AtomicBool::new(false),
        };
        let device = &enabled.admin.device;
        device.enable(layout).map_err(|error| device.attach_error("enabling", error))?;
        enabled.note_nssro();
        Ok(enabled)
    }

    /// Records whether CSTS.NSSRO is still set. Called after an enable, which has tried to clear
    /// the bit.
    pub(crate) fn note_nssro(&self) {
        let stuck = self.admin.device.csts().is_ok_and(|csts| csts.nssro());
        self.nssro_stuck.store(stuck, Ordering::Relaxed);
    }

    /// True if CSTS.NSSRO cannot be cleared. Then the bit does not indicate a subsystem reset.
    pub(crate) fn is_nssro_stuck(&self) -> bool {
        self.nssro_stuck.load(Ordering::Relaxed)
    }

    /// Connects the interrupt of the admin queue, if the transport has interrupt vectors.
    pub(crate) fn connect_admin_interrupt(&mut self) -> Result<(), AttachError> {
        if self.admin.device.transport.irq_vectors() == 0 {
            tracing::info!("{} raises no interrupts; polling for completions", self.admin.name());
            return Ok(());
        }
        let event = EventFd::new().map_err(AttachError::Event)?;
        self.io_queues.get_mut().connect_vector(&self.admin, 0, &event)?;
        self.admin_event = Some(event);
        Ok(())
    }

    /// Connects the interrupt of the admin queue again, after a reset.
    pub(crate) fn reconnect_admin_interrupt(&self) -> Result<(), TransportError> {
        match &self.admin_event {
            Some(event) => self.admin.device.transport.set_irq(0, Some(event)),
            None => Ok(()),
        }
    }

    /// Locks the I/O queue table: for creating and deleting queues, for reset and shutdown.
    pub(crate) fn io_queues(&self) -> MutexGuard<'_, IoQueueTable> {
        self.io_queues.lock()
    }

    /// Deletes both queues of a pair. Returns true if the controller no longer uses their memory.
    pub(crate) fn delete_io_queues(&self, qid: u16) -> bool {
        let mut io_queues = self.io_queues();
        match self.state.phase() {
            Phase::Disabled => true,
            Phase::Live => io_queues.delete(&self.admin, qid),
            _ => false,
        }
    }

    /// Shuts the controller down: deletes the queues, notifies the controller (CC.SHN), waits at
    /// most `limit` for completion, and disables it. If a step fails, the next steps are executed
    /// nevertheless. If disabling fails, the transport resets the controller, because shared memory
    /// can be freed only after the controller was disabled or reset.
    pub(crate) fn shut_down(&self, limit: Duration) -> Result<(), DetachError> {
        let mut io_queues = self.io_queues();
        let (admin, phase) = (&self.admin, self.state.phase());
        if !matches!(phase, Phase::Live | Phase::Removed) {
            return self.outcome(phase);
        }
        self.state.set_phase(Phase::Closing);
        let complaint = if let Some(why) = admin.device.broken() {
            Some(why)
        } else {
            let undeleted = io_queues.delete_all(admin);
            match admin.device.shut_down(limit) {
                Ok(()) => undeleted.map(|qid| format!("it did not delete queue pair {qid}")),
                Err(error) => Some(format!("shutdown: {error}")),
            }
        };
        io_queues.disconnect_all(admin);
        let disabled = admin.device.disable().or_else(|error| {
            tracing::warn!("{} was not disabled ({error}); resetting it", admin.name());
            admin.device.transport.reset().map_err(|why| format!("{error}; {why}"))
        });
        let device = admin.name().to_owned();
        match disabled {
            Ok(()) => {
                self.state.set_phase(Phase::Disabled);
                match complaint {
                    None => Ok(()),
                    Some(why) => Err(DetachError::Unclean { device, why }),
                }
            }
            Err(why) => {
                self.state.set_phase(Phase::Lost);
                Err(DetachError::Lost { device, why })
            }
        }
    }

    /// Result of a shutdown for a controller that is already closed or failed.
    fn outcome(&self, phase: Phase) -> Result<(), DetachError> {
        let Some(why) = self.state.failure() else { return Ok(()) };
        let (device, why) = (self.admin.name().to_owned(), why.to_string());
        Err(match phase {
            Phase::Lost => DetachError::Lost { device, why },
            _ => DetachError::Unclean { device, why },
        })
    }
}

impl Drop for EnabledController {
    fn drop(&mut self) {
        // In other phases, the controller was already shut down, or has failed.
        if matches!(self.state.phase(), Phase::Live | Phase::Removed)
            && let Err(error) = self.shut_down(self.admin.device.timeouts.shutdown)
        {
            tracing::warn!("{error}");
        }
        if self.state.phase() == Phase::Lost {
            let bytes = self.admin.leak_memory();
            tracing::warn!(
                "{} may still use its admin queues, so their memory ({bytes} bytes) is kept",
                self.admin.name()
            );
        }
    }
}
