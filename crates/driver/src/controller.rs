//! An attached controller.

use crate::admin::Admin;
use crate::attach::{Attached, attach, create_queue_pair};
use crate::device::Registers;
use crate::dma::{BufferPool, DmaError, LentMemory};
use crate::error::{AttachError, DetachError, QueueError};
use crate::events::EventListener;
use crate::namespace::Namespace;
use crate::options::{AttachOptions, Doorbells};
use crate::queue::{QueuePair, SpinPolicy};
use crate::recovery::RecoveryStats;
use crate::shared::Shared;
use crate::transport::{Transport, TransportError};
use shadowbell_doorbell::RingSize;
use shadowbell_memory::{EventFd, Mapping};
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
    shared: Arc<Shared>,
    identity: Box<IdentifyController>,
    namespaces: Vec<Namespace>,
    ready: Vec<QueuePair>,
    admin_event: Option<EventFd>,
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
        let Attached { shared, namespaces, mut queues, admin_event } = attach(transport, options)?;
        // Taken from the end, lowest identifier first.
        queues.reverse();
        let identity = shared.late.get().map(|late| late.identity.clone()).unwrap_or_default();
        Ok(Self { shared, identity, namespaces, ready: queues, admin_event, spin: options.spin })
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
        create_queue_pair(&self.shared, RingSize::new(entries).ok_or(option)?, self.spin)
    }

    /// How many queue pairs the controller granted.
    #[must_use]
    pub fn queue_pairs(&self) -> u16 {
        self.shared.late.get().map_or(0, |late| late.granted)
    }

    /// The most entries of a submission queue.
    #[must_use]
    pub fn queue_depth(&self) -> u32 {
        self.shared.late.get().map_or(0, |late| late.largest.entries())
    }

    /// How the doorbells are rung: what came of the wish in [`AttachOptions::doorbells`].
    #[must_use]
    pub fn doorbells(&self) -> Doorbells {
        self.shared.late.get().map_or(Doorbells::Mmio, |late| late.doorbells)
    }

    /// Whether the controller interrupts.
    #[must_use]
    pub fn has_interrupts(&self) -> bool {
        self.admin_event.is_some()
    }

    /// The most bytes that one I/O command moves.
    #[must_use]
    pub fn max_transfer_bytes(&self) -> u64 {
        self.shared.late.get().map_or(0, |late| late.max_transfer)
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
        self.namespaces = self
            .admin()
            .identify_namespaces(&self.identity, self.max_transfer_bytes())
            .map_err(|source| AttachError::Command { step: "Identify Namespace", source })?;
        Ok(())
    }

    /// Looks at how the controller does, now and not when the keeper does ([`recovery`]), and takes
    /// over the namespaces, if they were read again because an event said that they changed: whether
    /// they were.
    ///
    /// # Errors
    /// [`QueueError`], if the controller was given up, or is not there any more.
    ///
    /// [`recovery`]: crate::recovery
    pub fn check(&mut self) -> Result<bool, QueueError> {
        self.shared.watch();
        self.shared.hear();
        self.shared.check(0)?;
        let news = self.shared.news().take();
        let changed = news.is_some();
        if let Some(namespaces) = news {
            self.namespaces = namespaces;
        }
        Ok(changed)
    }

    /// What was done so far about a controller that did not do what it should.
    #[must_use]
    pub fn recovery_stats(&self) -> RecoveryStats {
        self.shared.counters.snapshot()
    }

    /// Resets the controller. Its queue pairs stay, and what is outstanding in them is submitted
    /// again, or ended, as [`recovery`](crate::recovery) has it.
    ///
    /// # Errors
    /// [`QueueError`], if the controller does not work after it.
    pub fn reset(&self) -> Result<(), QueueError> {
        self.shared.check(0)?;
        self.shared.reset(self.shared.generation(), "asked for by the program");
        self.shared.check(0)
    }

    /// What Identify Controller returned when attaching.
    #[must_use]
    pub fn identity(&self) -> &IdentifyController {
        &self.identity
    }

    /// Controller Capabilities.
    #[must_use]
    pub fn capabilities(&self) -> Cap {
        self.shared.device.cap
    }

    /// The version of the specification that the controller follows.
    #[must_use]
    pub fn version(&self) -> Vs {
        self.shared.device.vs
    }

    /// Reads the registers that say what the controller is and how it does.
    ///
    /// # Errors
    /// [`TransportError`], when the device can not be reached.
    pub fn registers(&self) -> Result<Registers, TransportError> {
        self.shared.device.registers()
    }

    /// What a person would call the device ([`Transport::name`]).
    #[must_use]
    pub fn name(&self) -> &str {
        self.shared.name()
    }

    /// A handle on the control plane.
    #[must_use]
    pub fn admin(&self) -> Admin {
        Admin::new(Arc::clone(&self.shared))
    }

    /// Memory for `count` buffers of `size` bytes, shared with the controller at once.
    ///
    /// # Errors
    /// [`DmaError`].
    pub fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        let page = self.shared.device.page as usize;
        BufferPool::new(&self.shared.device.transport, count, size, page)
    }

    /// Lets the controller reach memory that is there already, without a copy. How much of it there
    /// may be is the transport's affair: through VFIO all of it is pinned.
    ///
    /// # Errors
    /// [`DmaError`], when the transport can not share this memory.
    pub fn lend(&self, mapping: &Arc<Mapping>) -> Result<LentMemory, DmaError> {
        LentMemory::new(&self.shared.device.transport, mapping)
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
        let spawn = |event| EventListener::spawn(&self.shared, event, deliver);
        self.admin_event.as_ref().map(spawn).transpose()
    }

    /// Ends the controller's work: deletes its queues, notifies it of the shutdown and waits for
    /// that to complete, and disables it. Queue pairs and handles that are still around only return
    /// errors from then on.
    ///
    /// # Errors
    /// [`DetachError`], when the shutdown did not complete in time.
    pub fn detach(self) -> Result<(), DetachError> {
        self.shared.shut_down()
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        self.ready.clear();
        self.shared.let_go();
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
