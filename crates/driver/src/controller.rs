//! Attached NVMe controller: the public handle of the driver.

use crate::admin::{Admin, AdminCommands, identify_namespaces};
use crate::attach::{Attached, attach};
use crate::attached_controller::AttachedController;
use crate::device::Registers;
use crate::dma::{BufferPool, DmaError, SharedMemory};
use crate::error::{AttachError, DetachError, QueueError};
use crate::namespace::Namespace;
use crate::options::{AttachOptions, Doorbells};
use crate::queue::SpinPolicy;
use crate::queue_pair::QueuePair;
use crate::recovery::{RecoveryStats, check_status, read_events, reset};
use crate::transport::{Transport, TransportError};
use shadowbell_doorbell::RingSize;
use shadowbell_memory::{EventFd, Mapping};
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::identify::IdentifyController;
use shadowbell_spec::regs::{Cap, Vs};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::{fmt, io};

/// A controller that this program drives.
///
/// The controller is shut down by [`detach`](Self::detach), or when its last handle (this value, a
/// queue pair, an [`Admin`]) is dropped.
pub struct Controller {
    attached: Arc<AttachedController>,
    namespaces: Vec<Namespace>,
    ready: Vec<QueuePair>,
    spin: SpinPolicy,
}

impl Controller {
    /// Takes control of the controller behind `transport`: disables it, enables it with new admin
    /// queues, identifies it, creates I/O queues. Every step has a deadline.
    ///
    /// # Errors
    /// [`AttachError`]; the controller is disabled again.
    pub fn attach(
        transport: Arc<dyn Transport>,
        options: &AttachOptions,
    ) -> Result<Self, AttachError> {
        let Attached { controller, namespaces, mut queues } = attach(transport, options)?;
        // `take_queue_pair` pops from the end. After the reversal, it returns the lowest identifier
        // first.
        queues.reverse();
        Ok(Self { attached: controller, namespaces, ready: queues, spin: options.spin })
    }

    /// Takes a queue pair that was created when attaching; `None` if all were taken.
    pub fn take_queue_pair(&mut self) -> Option<QueuePair> {
        self.ready.pop()
    }

    /// Creates a queue pair of `entries` entries, in place of one that was taken and dropped. The
    /// number of entries is limited to [`AttachOptions::queue_depth`].
    ///
    /// # Errors
    ///
    /// [`AttachError`], if all granted queue pairs exist or the controller refuses.
    pub fn create_queue_pair(&self, entries: u32) -> Result<QueuePair, AttachError> {
        let why = "it has to be 2 to 65536";
        let option = AttachError::Option { option: "entries", value: entries.into(), why };
        QueuePair::create(&self.attached, RingSize::new(entries).ok_or(option)?, self.spin)
    }

    /// The number of queue pairs that the controller granted.
    #[must_use]
    pub fn queue_pairs(&self) -> u16 {
        self.attached.info.granted
    }

    /// The maximum number of entries of a submission queue.
    #[must_use]
    pub fn queue_depth(&self) -> u32 {
        self.attached.info.largest.entries()
    }

    /// The doorbell mode in use: the outcome of [`AttachOptions::doorbells`].
    #[must_use]
    pub fn doorbells(&self) -> Doorbells {
        self.attached.info.doorbells
    }

    /// True if the controller raises interrupts.
    #[must_use]
    pub fn has_interrupts(&self) -> bool {
        self.attached.info.interrupts
    }

    /// The maximum number of bytes that one I/O command transfers.
    #[must_use]
    pub fn max_transfer_bytes(&self) -> u64 {
        self.attached.info.max_transfer
    }

    /// The active namespaces, as of attaching or the last refresh.
    #[must_use]
    pub fn namespaces(&self) -> &[Namespace] {
        &self.namespaces
    }

    /// The active namespace `nsid`.
    #[must_use]
    pub fn namespace(&self, nsid: u32) -> Option<&Namespace> {
        self.namespaces.iter().find(|namespace| namespace.nsid() == nsid)
    }

    /// Identifies the namespaces again, for example after a namespace change event.
    ///
    /// # Errors
    /// [`AttachError::Command`]; the list of namespaces remains unchanged.
    pub fn refresh_namespaces(&mut self) -> Result<(), AttachError> {
        let info = &self.attached.info;
        self.namespaces =
            identify_namespaces(&*self.attached, &info.identity, info.max_transfer)
                .map_err(|source| AttachError::Command { step: "Identify Namespace", source })?;
        Ok(())
    }

    /// Checks the controller's status immediately instead of at the next watchdog interval
    /// ([`recovery`]). If the namespaces were identified again after a namespace change event,
    /// adopts the new list and returns true.
    ///
    /// # Errors
    /// [`QueueError`], if the controller has failed or was removed.
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

    /// Counts of recovery actions since attaching.
    #[must_use]
    pub fn recovery_stats(&self) -> RecoveryStats {
        self.attached.counters.snapshot()
    }

    /// Resets the controller. Its queue pairs continue; their outstanding commands are submitted
    /// again or fail, as [`recovery`](crate::recovery) describes.
    ///
    /// # Errors
    /// [`QueueError`], if the controller does not work after the reset.
    pub fn reset(&self) -> Result<(), QueueError> {
        self.attached.check(0)?;
        reset(&self.attached, self.attached.state().generation(), "requested by the program");
        self.attached.check(0)
    }

    /// The Identify Controller data structure, as of attaching.
    #[must_use]
    pub fn identity(&self) -> &IdentifyController {
        &self.attached.info.identity
    }

    /// Controller Capabilities.
    #[must_use]
    pub fn capabilities(&self) -> Cap {
        self.attached.plane().device.cap
    }

    /// The version of the NVMe specification that the controller implements.
    #[must_use]
    pub fn version(&self) -> Vs {
        self.attached.plane().device.vs
    }

    /// Reads the registers CC and CSTS, and returns them with CAP and VS.
    ///
    /// # Errors
    /// [`TransportError`], if the device is unreachable.
    pub fn registers(&self) -> Result<Registers, TransportError> {
        self.attached.plane().device.registers()
    }

    /// Human-readable name of the device ([`Transport::name`]).
    #[must_use]
    pub fn name(&self) -> &str {
        self.attached.name()
    }

    /// Creates a handle for admin commands.
    #[must_use]
    pub fn admin(&self) -> Admin {
        Admin::new(Arc::clone(&self.attached))
    }

    /// Allocates `count` buffers of `size` bytes in memory that is shared with the controller.
    ///
    /// # Errors
    /// [`DmaError`].
    pub fn buffers(&self, count: usize, size: usize) -> Result<BufferPool, DmaError> {
        self.attached.buffers(count, size)
    }

    /// Shares existing memory with the controller, for I/O without a copy. The transport limits the
    /// amount: VFIO pins all of the shared memory.
    ///
    /// # Errors
    /// [`DmaError`], if the transport cannot share this memory.
    pub fn share_memory(&self, mapping: &Arc<Mapping>) -> Result<SharedMemory, DmaError> {
        SharedMemory::new(&self.attached.plane().device.transport, mapping)
    }

    /// Calls `deliver` for each asynchronous event, on a separate thread, until the returned value
    /// is dropped. The thread sleeps between events, so it needs the admin interrupt. Returns
    /// `None` without interrupts; then poll [`Admin::take_events`].
    ///
    /// # Errors
    /// The error of the system, if no thread or descriptor is available.
    pub fn on_event(
        &self,
        deliver: impl FnMut(AsyncEvent) + Send + 'static,
    ) -> io::Result<Option<EventListener>> {
        let spawn = |event| EventListener::spawn(&self.attached, event, deliver);
        self.attached.enabled.admin_event.as_ref().map(spawn).transpose()
    }

    /// Shuts the controller down: deletes its queues, notifies it of the shutdown (CC.SHN), waits
    /// until the shutdown is complete, and disables the controller. Remaining queue pairs and
    /// handles only return errors afterwards.
    ///
    /// # Errors
    /// [`DetachError`], if the shutdown did not complete in time.
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

/// Delivers asynchronous events to a callback until it is dropped. Created by
/// [`Controller::on_event`](crate::Controller::on_event).
pub struct EventListener {
    stop: Arc<AtomicBool>,
    event: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl EventListener {
    pub(crate) fn spawn(
        controller: &Arc<AttachedController>,
        event: &EventFd,
        mut deliver: impl FnMut(AsyncEvent) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let waits_on = event.try_clone()?;
        let event = event.try_clone()?;
        // The thread holds a weak reference, so that it does not keep the controller attached.
        let controller: Weak<AttachedController> = Arc::downgrade(controller);
        let stopped = Arc::clone(&stop);
        let thread =
            std::thread::Builder::new().name("shadowbell-events".into()).spawn(move || {
                while !stopped.load(Ordering::Acquire) {
                    let Some(controller) = controller.upgrade() else { return };
                    waits_on.drain();
                    let queue = &controller.plane().queue;
                    let (events, lost) = queue.take_events();
                    queue.ring_cq_doorbell();
                    // The controller interrupts only for completions after the published head. The
                    // second call finds the events that arrived before the head was published.
                    let (more, lost_too) = queue.take_events();
                    drop(controller);
                    if lost + lost_too != 0 {
                        tracing::warn!("{} asynchronous events were lost", lost + lost_too);
                    }
                    events.into_iter().chain(more).for_each(&mut deliver);
                    if let Err(error) = waits_on.wait(None) {
                        tracing::warn!("no more asynchronous events: {error}");
                        return;
                    }
                }
            })?;
        Ok(Self { stop, event, thread: Some(thread) })
    }
}

impl Drop for EventListener {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.event.signal();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            // An error of `join` means that the callback has panicked.
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for EventListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventListener").finish_non_exhaustive()
    }
}
