//! A controller that was enabled with an admin queue of ours, and how its work ends.

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

/// A controller from before it is identified until it is shut down, which dropping this does.
pub(crate) struct EnabledController {
    pub(crate) admin: AdminPlane,
    pub(crate) state: ControllerState,
    io_queues: Mutex<IoQueueTable>,
    /// What vector 0 signals.
    pub(crate) admin_event: Option<EventFd>,
    /// CSTS.NSSRO can not be cleared.
    nssro_stuck: AtomicBool,
}

impl EnabledController {
    /// Disables the controller, and enables it with an admin queue of ours.
    pub(crate) fn enable(
        transport: Arc<dyn Transport>,
        options: &AttachOptions,
    ) -> Result<Self, AttachError> {
        let device = Device::probe(transport, options.page_size, options.timeouts)?;
        device.disable().map_err(|error| device.attach_error("disabling", error))?;
        let (admin, layout) = AdminPlane::new(device)?;
        // From here on it has to be shut down, however far it comes.
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

    /// After the controller was enabled, which clears CSTS.NSSRO if anything does.
    pub(crate) fn note_nssro(&self) {
        let stuck = self.admin.device.csts().is_ok_and(|csts| csts.nssro());
        self.nssro_stuck.store(stuck, Ordering::Relaxed);
    }

    /// Whether CSTS.NSSRO can not be cleared, and so says nothing.
    pub(crate) fn is_nssro_stuck(&self) -> bool {
        self.nssro_stuck.load(Ordering::Relaxed)
    }

    /// Gives the admin queue its interrupt, if it can have one.
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

    /// Gives the admin queue its interrupt again, after a reset.
    pub(crate) fn reconnect_admin_interrupt(&self) -> Result<(), TransportError> {
        match &self.admin_event {
            Some(event) => self.admin.device.transport.set_irq(0, Some(event)),
            None => Ok(()),
        }
    }

    /// The I/O queues, for whoever creates or deletes them, resets the controller or shuts it down.
    pub(crate) fn io_queues(&self) -> MutexGuard<'_, IoQueueTable> {
        self.io_queues.lock()
    }

    /// Deletes both queues of a pair. Whether the controller is certainly done with them.
    pub(crate) fn delete_io_queues(&self, qid: u16) -> bool {
        let mut io_queues = self.io_queues();
        match self.state.phase() {
            Phase::Disabled => true,
            Phase::Live => io_queues.delete(&self.admin, qid),
            _ => false,
        }
    }

    /// Ends the controller's work: deletes the queues, notifies it of the shutdown, waits until
    /// that is complete, `limit` at most, and disables it. Whatever fails, it ends up disabled or
    /// reset if that can be had at all, because only then memory can be given back.
    pub(crate) fn shut_down(&self, limit: Duration) -> Result<(), DetachError> {
        let mut io_queues = self.io_queues();
        let (admin, phase) = (&self.admin, self.state.phase());
        if !matches!(phase, Phase::Live | Phase::Gone) {
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

    /// How a controller was left that was given up before.
    fn outcome(&self, phase: Phase) -> Result<(), DetachError> {
        let Some(why) = self.state.over() else { return Ok(()) };
        let (device, why) = (self.admin.name().to_owned(), why.to_string());
        Err(match phase {
            Phase::Lost => DetachError::Lost { device, why },
            _ => DetachError::Unclean { device, why },
        })
    }
}

impl Drop for EnabledController {
    fn drop(&mut self) {
        // One that was attached was shut down before.
        if matches!(self.state.phase(), Phase::Live | Phase::Gone)
            && let Err(error) = self.shut_down(self.admin.device.timeouts.shutdown)
        {
            tracing::warn!("{error}");
        }
        if self.state.phase() == Phase::Lost {
            let bytes = self.admin.keep_memory();
            tracing::warn!(
                "{} may still use its admin queues, so their memory ({bytes} bytes) is kept",
                self.admin.name()
            );
        }
    }
}
