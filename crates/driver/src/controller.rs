//! An attached controller.

use crate::admin::{Admin, AdminCommands, identify_namespaces};
use crate::attach::{Attached, attach};
use crate::attached::AttachedController;
use crate::device::Registers;
use crate::dma::{BufferPool, DmaError, SharedMemory};
use crate::error::{AttachError, DetachError, QueueError};
use crate::events::EventListener;
use crate::namespace::Namespace;
use crate::options::{AttachOptions, Doorbells};
use crate::queue::SpinPolicy;
use crate::queue_pair::QueuePair;
use crate::recovery::{RecoveryStats, check_status, read_events, reset};
use crate::transport::{Transport, TransportError};
use shadowbell_doorbell::RingSize;
use shadowbell_memory::Mapping;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::identify::IdentifyController;
use shadowbell_spec::regs::{Cap, Vs};
use std::fmt;
use std::io;
use std::sync::Arc;

/// A controller that this program drives.
///
/// The controller is shut down in an orderly way when it is [detached](Self::detach), or when the
/// last of its handles (this, its queue pairs, its [`Admin`] handles) is dropped.
pub struct Controller {
    attached: Arc<AttachedController>,
    namespaces: Vec<Namespace>,
    ready: Vec<QueuePair>,
    spin: SpinPolicy,
}

impl Controller {
    /// Takes the controller at the other end of `transport` over: disables it, enables it with
    /// queues of ours, and finds out what it is. Every step has a deadline.
    ///
    /// # Errors
    /// [`AttachError`]; the controller is disabled again.
    pub fn attach(
        transport: Arc<dyn Transport>,
        options: &AttachOptions,
    ) -> Result<Self, AttachError> {
        let Attached { controller, namespaces, mut queues } = attach(transport, options)?;
        // Taken from the end, lowest identifier first.
        queues.reverse();
        Ok(Self { attached: controller, namespaces, ready: queues, spin: options.spin })
    }

    /// A queue pair that was created when attaching, or nothing if all were taken.
    pub fn take_queue_pair(&mut self) -> Option<QueuePair> {
        self.ready.pop()
    }

    /// Creates a queue pair of `entries` entries, in the place of one that was taken and dropped.
    /// It gets at most as many entries as [`AttachOptions::queue_depth`] asked for.
    ///
    /// # Errors
    /// [`AttachError`], when all that were granted exist or the controller refuses.
    pub fn create_queue_pair(&self, entries: u32) -> Result<QueuePair, AttachError> {
        let why = "it has to be 2 to 65536";
        let option = AttachError::Option { option: "entries", value: entries.into(), why };
        QueuePair::create(&self.attached, RingSize::new(entries).ok_or(option)?, self.spin)
    }

    /// How many queue pairs the controller granted.
    #[must_use]
    pub fn queue_pairs(&self) -> u16 {
        self.attached.info.granted
    }

    /// The most entries of a submission queue.
    #[must_use]
    pub fn queue_depth(&self) -> u32 {
        self.attached.info.largest.entries()
    }

    /// How the doorbells are rung: what came of [`AttachOptions::doorbells`].
    #[must_use]
    pub fn doorbells(&self) -> Doorbells {
        self.attached.info.doorbells
    }

    /// Whether the controller interrupts.
    #[must_use]
    pub fn has_interrupts(&self) -> bool {
        self.attached.info.interrupts
    }

    /// The most bytes that one I/O command moves.
    #[must_use]
    pub fn max_transfer_bytes(&self) -> u64 {
        self.attached.info.max_transfer
    }

    /// The active namespaces, as they were when attaching.
    #[must_use]
    pub fn namespaces(&self) -> &[Namespace] {
        &self.namespaces
    }

    /// The active namespace `nsid`.
    #[must_use]
    pub fn namespace(&self, nsid: u32) -> Option<&Namespace> {
        self.namespaces.iter().find(|namespace| namespace.nsid() == nsid)
    }

    /// Reads the namespaces again, after an event that said that they changed.
    ///
    /// # Errors
    /// [`AttachError::Command`]; what was known before stays.
    pub fn refresh_namespaces(&mut self) -> Result<(), AttachError> {
        let info = &self.attached.info;
        self.namespaces =
            identify_namespaces(&*self.attached, &info.identity, info.max_transfer)
                .map_err(|source| AttachError::Command { step: "Identify Namespace", source })?;
        Ok(())
    }

    /// Reads the controller's status, now and not when the watchdog does ([`recovery`]), and takes
    /// over the namespaces, if they were read again because an event said that they changed:
    /// whether they were.
    ///
    /// # Errors
    /// [`QueueError`], if the controller was given up, or is not there any more.
    ///
    /// [`recovery`]: crate::recovery
    pub fn check(&mut self) -> Result<bool, QueueError> {
        check_status(&self.attached);
        read_events(&self.attached);
        self.attached.check(0)?;
        let changed = self.attached.take_changed_namespaces();
        let has_changed = changed.is_some();
        if let Some(namespaces) = changed {
            self.namespaces = namespaces;
        }
        Ok(has_changed)
    }

    /// What was done so far about a controller that did not do what it should.
    #[must_use]
    pub fn recovery_stats(&self) -> RecoveryStats {
        self.attached.counters.snapshot()
    }

    /// Resets the controller. Its queue pairs stay, and what is outstanding in them is submitted
    /// again, or ended, as [`recovery`](crate::recovery) has it.
    ///
    /// # Errors
    /// [`QueueError`], if the controller does not work after it.
    pub fn reset(&self) -> Result<(), QueueError> {
        self.attached.check(0)?;
        reset(&self.attached, self.attached.state().generation(), "asked for by the program");
        self.attached.check(0)
    }

    /// What Identify Controller returned when attaching.
    #[must_use]
    pub fn identity(&self) -> &IdentifyController {
        &self.attached.info.identity
    }

    /// Controller Capabilities.
    #[must_use]
    pub fn capabilities(&self) -> Cap {
        self.attached.plane().device.cap
    }

    /// The version of the specification that the controller follows.
    #[must_use]
    pub fn version(&self) -> Vs {
        self.attached.plane().device.vs
    }

    /// Reads the registers that say what the controller is and how it does.
    ///
    /// # Errors
    /// [`TransportError`], when the device can not be reached.
    pub fn registers(&self) -> Result<Registers, TransportError> {
        self.attached.plane().device.registers()
    }

    /// What a person would call the device ([`Transport::name`]).
    #[must_use]
    pub fn name(&self) -> &str {
        self.attached.name()
    }

    /// A handle on the control plane.
    #[must_use]
    pub fn admin(&self) -> Admin {
        Admin::new(Arc::clone(&self.attached))
    }

    /// Memory for `count` buffers of `size` bytes, shared with the controller at once.
    ///
    /// # Errors
    /// [`DmaError`].
    pub fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        self.attached.buffers(count, size)
    }

    /// Lets the controller reach memory that is there already, without a copy. How much of it there
    /// may be is the transport's affair: through VFIO all of it is pinned.
    ///
    /// # Errors
    /// [`DmaError`], when the transport can not share this memory.
    pub fn share_memory(&self, mapping: &Arc<Mapping>) -> Result<SharedMemory, DmaError> {
        SharedMemory::new(&self.attached.plane().device.transport, mapping)
    }

    /// Calls `deliver` for each asynchronous event, on a thread of its own, as long as the returned
    /// value lives. The thread sleeps in between; a controller without interrupts has no such
    /// thread (`None`), and [`Admin::take_events`] is the way.
    ///
    /// # Errors
    /// The system's, when there is no thread or descriptor to be had.
    pub fn on_event(
        &self,
        deliver: impl FnMut(AsyncEvent) + Send + 'static,
    ) -> io::Result<Option<EventListener>> {
        let spawn = |event| EventListener::spawn(&self.attached, event, deliver);
        self.attached.enabled.admin_event.as_ref().map(spawn).transpose()
    }

    /// Ends the controller's work: deletes its queues, notifies it of the shutdown and waits for
    /// that to complete, and disables it. Queue pairs and handles that are still around only return
    /// errors from then on.
    ///
    /// # Errors
    /// [`DetachError`], when the shutdown did not complete in time.
    pub fn detach(self) -> Result<(), DetachError> {
        self.attached.shut_down()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.ready.clear();
        AttachedController::shut_down_if_last(&self.attached);
    }
}

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller")
            .field("name", &self.name())
            .field("namespaces", &self.namespaces.len())
            .field("queue_pairs", &self.queue_pairs())
            .field("doorbells", &self.doorbells())
            .finish_non_exhaustive()
    }
}
