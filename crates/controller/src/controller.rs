//! Public interface of a controller.
//!
//! * Creation, placement and statistics.
//! * Register accesses, doorbells and interrupts.
//! * DMA maps of host memory, and dirty page logging.
//! * Adding, removing and changing namespaces while the host uses the controller.
//! * Quiesce, restore, migration and crash recovery.

use crate::admin::OutOfBandCommand;
use crate::config::{Config, ConfigError, MAX_NAMESPACES, NamespaceConfig};
use crate::context::Context;
use crate::control::{Callback, Deferred, DoorbellEventfds, NamespaceError};
use crate::control_plane::ControllerInner;
use crate::event::Listener;
use crate::journal::InFlightCommand;
use crate::migration_state::MigrationState;
use crate::namespace::{Guarantees, Namespaces};
use crate::notice::{ControlHandle, ControlPlane};
use crate::restore_error::{RestoreError, SaveError};
use crate::route::RelocateError;
use crate::saved::{CauseOfDeath, Recorder, SavedController, SavedGuarantees};
use crate::shared::{ControllerShared, DOORBELL_BYTES, DSTRD, MAX_QUEUES};
use crate::stats::Stats;
use crate::trace::{COMPLETION_QUEUE, Kind};
use crate::worker::mailbox::Message;
use crate::worker::{DoorbellSource, Pool};
use shadowbell_disk::Disk;
use shadowbell_memory::{DirtyLog, DmaError, DmaTable, EventFd, SharedBytes};
use shadowbell_spec::Status;
use shadowbell_spec::log::{AnaGroup, AnaState};
use shadowbell_spec::regs::{DOORBELLS, DoorbellKind, decode_doorbell};
use shadowbell_state::Descriptors;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Weak};
use std::{fmt, io};

/// Size of BAR0: a page of registers and a page of doorbells.
pub const BAR0_BYTES: u64 = DOORBELLS + DOORBELL_BYTES;

/// Error in creating a controller.
#[derive(Debug, thiserror::Error)]
pub enum NewError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The doorbell page could not be allocated.
    #[error(transparent)]
    Memory(#[from] shadowbell_memory::MapError),
}

/// Properties of the front end, the code that connects a controller to its host.
#[derive(Default)]
pub struct Carrier {
    /// True if the host maps the doorbell page and writes to it directly. Writes then do not trap,
    /// so I/O threads poll the doorbells at least every millisecond.
    pub mapped_doorbells: bool,
    /// Callback for events. It runs on the thread that causes the event.
    pub listener: Option<Listener>,
}

impl fmt::Debug for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carrier").field("mapped_doorbells", &self.mapped_doorbells).finish()
    }
}

/// NVMe controller without a transport. Its front end, a vfio-user server or a driver in the same
/// process, reads and writes registers and maps host memory.
///
/// A clone is another handle of the same controller. All methods may be called from any thread.
/// None of them waits for I/O.
#[derive(Clone)]
pub struct Controller(Arc<ControllerInner>);

/// Interrupt vectors to raise when a migrated controller [runs](Controller::run_migrated).
#[derive(Debug, Default)]
pub struct Announcement(Vec<u16>);

static NEXT_ID: AtomicU32 = AtomicU32::new(1);

impl Controller {
    /// Creates a disabled controller that `pool` serves.
    ///
    /// # Errors
    /// [`NewError`] if the configuration is invalid or memory is exhausted.
    pub fn new(config: Config, pool: Pool, carrier: Carrier) -> Result<Self, NewError> {
        config.validate()?;
        let namespaces = Namespaces::new(&config);
        if let Some(member) = &config.member {
            member.power_on();
        }
        Ok(Self::with_doorbells(config, namespaces, pool, carrier, None)?)
    }

    /// Creates a controller that continues a [quiesced](Self::freeze) one, of this process or of a
    /// process that is about to end. The host-visible parts of `config` and `carrier` must be the
    /// same.
    ///
    /// The new controller uses the doorbell page of the old one. It is disabled until
    /// [`restore`](Self::restore). Before that call, host memory must be mapped and interrupts
    /// connected as they were for the old one.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub fn successor(
        config: Config,
        pool: Pool,
        carrier: Carrier,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<Self, RestoreError> {
        config.validate_from(0)?;
        let doorbells = fds.take(saved.doorbells)?;
        let namespaces = match saved.shape.guarantees {
            None => Namespaces::new(&config),
            Some(SavedGuarantees { highest_nsid, volatile_cache, zeroes }) => {
                let guarantees = Guarantees { volatile_cache, zeroes };
                Namespaces::resuming(&config, guarantees, highest_nsid.min(MAX_NAMESPACES as u32))
            }
        };
        let controller = Self::with_doorbells(config, namespaces, pool, carrier, Some(doorbells))?;
        match saved.shape.difference(&controller.0.context.shape()) {
            Some(what) => Err(RestoreError::Shape(what)),
            None => Ok(controller),
        }
    }

    fn with_doorbells(
        config: Config,
        namespaces: Namespaces,
        pool: Pool,
        carrier: Carrier,
        doorbells: Option<OwnedFd>,
    ) -> Result<Self, shadowbell_memory::MapError> {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(ControllerShared::new(
            id,
            carrier.mapped_doorbells,
            pool.max_workers(),
            doorbells,
        )?);
        Ok(Self(Arc::new_cyclic(|inner: &Weak<ControllerInner>| {
            let plane: Weak<dyn ControlPlane> = inner.clone();
            let control = ControlHandle::new(plane);
            if let Some(member) = &config.member {
                member.attach(control.clone());
            }
            let listener = carrier.listener;
            let context = Context::new(config, namespaces, shared, pool, control, listener);
            ControllerInner::new(context, inner.clone())
        })))
    }

    /// Moves the controller to a dedicated I/O thread, for the rest of its lifetime. Commands in
    /// flight end before the move, and others wait in their queues. The host does not observe the
    /// move. The caller uses this for a guest that is less trusted than others or has paid for the
    /// thread. A guest that delays other guests is moved automatically
    /// ([`Event::Isolated`](crate::Event::Isolated)).
    ///
    /// # Errors
    /// [`RelocateError`].
    pub fn isolate(&self) -> Result<(), RelocateError> {
        self.0.relocate(|control, cx| control.isolate(cx))
    }

    /// Moves the controller to I/O thread `worker` of its pool, for the rest of its lifetime, like
    /// [`isolate`](Self::isolate).
    ///
    /// # Errors
    /// [`RelocateError`].
    pub fn pin_to(&self, worker: usize) -> Result<(), RelocateError> {
        self.0.relocate(|control, cx| control.pin_to(cx, worker))
    }

    /// Shared interior of the controller, for fault injection.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    pub(crate) fn inner(&self) -> &Arc<ControllerInner> {
        &self.0
    }

    /// Configuration of the controller, without namespaces; see
    /// [`namespaces`](Self::namespaces).
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.context.config
    }

    /// Resets the controller, for a function level reset or a reset of the transport. Registers get
    /// their power-on values; DMA maps and interrupt vectors stay. `done` runs on any thread, when
    /// no command is in flight. If the last handle of the controller is dropped before that, `done`
    /// is dropped without a call.
    pub fn reset(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.reset(cx, Box::new(done)));
    }

    /// Handles a disconnected host: resets the controller, then drops DMA maps and interrupts.
    /// `done` runs on any thread, when the controller no longer accesses host memory.
    pub fn disconnect(&self, done: impl FnOnce() + Send + 'static) {
        // The callback keeps the controller alive until it runs, even if all handles are dropped.
        let inner = Arc::clone(&self.0);
        let done: Callback = Box::new(move || {
            done();
            drop(inner);
        });
        self.0.with(|control, cx| control.disconnect(cx, done));
    }

    /// Executes an out-of-band Identify or Get Log Page. It may be called at any time, because it
    /// needs no queue and does not change the controller's state.
    ///
    /// # Errors
    /// The completion status of the command.
    pub fn out_of_band(&self, command: OutOfBandCommand) -> Result<Vec<u8>, Status> {
        self.0.control().out_of_band(&self.0.context, command)
    }

    /// Returns and resets the maximum number of pending notices. The fuzz targets of this workspace
    /// check that the number is bounded.
    #[doc(hidden)]
    #[must_use]
    pub fn max_notices(&self) -> usize {
        self.0.max_notices()
    }

    /// Number of the controller in its process, which no other controller has had.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.0.context.shared.id
    }

    /// Statistics of the controller. The counters are read directly, without a message to an I/O
    /// thread, so a blocked I/O thread does not delay the caller. An event is counted before the
    /// host can observe it. While the controller is busy, the values are not all from the same
    /// instant.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Context { shared, pool, .. } = &self.0.context;
        shared.stats(|worker| pool.sleep_stats(worker))
    }

    /// Logs the disks that have not answered all requests of this controller, with the number of
    /// requests. The I/O threads write these messages after the call.
    pub fn log_pending(&self) {
        self.0.with(|control, cx| {
            control.log_pending(cx);
            Deferred::default()
        });
    }

    /// Number of completed I/O commands.
    #[must_use]
    pub fn io_commands(&self) -> u64 {
        self.0.context.shared.io().commands()
    }
}

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller")
            .field("id", &self.0.context.shared.id)
            .field("serial", &self.0.context.config.serial)
            .finish_non_exhaustive()
    }
}

/// Register accesses, doorbells and interrupts.
impl Controller {
    /// Reads BAR0. Registers are little-endian. Any offset, length and alignment is valid; bytes
    /// beyond [`BAR0_BYTES`] are zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        // Doorbells read as zero, because their read value is vendor specific (PCIe 1.1, 3.1.2.1).
        if offset < DOORBELLS {
            self.0.control().read(offset, data);
        }
    }

    /// Writes BAR0. Registers accept aligned accesses of 4 bytes; 8-byte registers also accept 8
    /// bytes. The specification leaves other accesses undefined, and they are ignored.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if offset >= DOORBELLS {
            if let Ok(value) = data.try_into().map(u32::from_le_bytes) {
                self.write_doorbell(offset, value);
            }
            return;
        }
        self.0.with(|control, cx| control.write(cx, offset, data));
    }

    /// Delivers a trapped doorbell write at `offset` in BAR0. Returns the I/O thread that was
    /// woken, if any.
    pub fn write_doorbell(&self, offset: u64, value: u32) -> Option<usize> {
        let Context { shared, pool, .. } = &self.0.context;
        let doorbell = decode_doorbell(offset, DSTRD);
        let Some(doorbell) = doorbell.filter(|d| usize::from(d.qid) < MAX_QUEUES) else {
            self.invalid_doorbell_register();
            return None;
        };
        let worker = shared.trap(doorbell.qid, doorbell.kind);
        let side = if doorbell.kind == DoorbellKind::Cq { COMPLETION_QUEUE } else { 0 };
        self.0.context.trace(Kind::MmioWrite, doorbell.qid | side, value, 0);
        let register = shared.register(doorbell.qid, doorbell.kind);
        if worker.is_none() && doorbell.qid != 0 {
            self.invalid_doorbell_register();
            return None;
        }
        let valid = shared.validate_trapped(doorbell.qid, doorbell.kind, &register, value);
        let Ok(value) = valid else {
            self.0.context.trace(Kind::Invalid, doorbell.qid | side, value, 0);
            self.invalid_doorbell_value();
            return None;
        };
        if doorbell.qid == 0 {
            // A host that writes a doorbell of the disabled controller has submitted no command.
            if !self.0.control().is_enabled() {
                return None;
            }
            shadowbell_doorbell::Cell::store_release(&register, value);
            self.0.schedule();
            return None;
        }
        let worker = worker?;
        let ring = |worker| match doorbell.kind {
            DoorbellKind::Sq => pool.write_doorbell(worker, shared, &register, value),
            DoorbellKind::Cq => {
                shadowbell_doorbell::Cell::store_release(&register, value);
                // Pairs with the fence of the I/O thread that goes to sleep, after its call of
                // `request_head_wakeup`. Either that thread sees the head in its recheck, or this
                // thread sees the request for a wakeup.
                fence(Ordering::SeqCst);
                shared.needs_head_wakeup(doorbell.qid)
                    && pool.write_doorbell(worker, shared, &register, value)
            }
        };
        let woken = ring(worker);
        // The queue may have moved to another I/O thread that read the register before this write.
        // In that case the doorbell is delivered to that thread too.
        match shared.owner(doorbell.qid, doorbell.kind) {
            Some(now) if now != worker => ring(now).then_some(now),
            _ => woken.then_some(worker),
        }
    }

    /// Doorbell page (BAR0 from 1000h on), backed by a memfd. A host may map it only if the
    /// controller was created with
    /// [`Carrier::mapped_doorbells`](crate::Carrier::mapped_doorbells).
    #[must_use]
    pub fn doorbells(&self) -> &SharedBytes {
        self.0.context.shared.doorbells()
    }

    /// True if the controller expects its doorbells to be mapped.
    #[must_use]
    pub fn has_mapped_doorbells(&self) -> bool {
        self.0.context.shared.mapped
    }

    fn invalid_doorbell_value(&self) {
        self.0.with(|control, _| {
            control.invalid_doorbell_value();
            Deferred::default()
        });
    }

    fn invalid_doorbell_register(&self) {
        self.0.with(|control, _| {
            control.invalid_doorbell_register();
            Deferred::default()
        });
    }

    /// Eventfds that replace doorbell writes of the existing I/O queues. There are none unless
    /// Doorbell Buffer Config is in use. A host first stores the value in its shadow doorbell page.
    /// It may then signal the eventfd instead of writing the doorbell register.
    ///
    /// An eventfd has no effect after its queue is deleted or the controller is reset.
    ///
    /// # Errors
    /// The error of the system if no more file descriptors are available.
    pub fn doorbell_eventfds(&self) -> io::Result<DoorbellEventfds> {
        let events = self.0.control().doorbell_eventfds(&self.0.context);
        self.0.note_change();
        self.0.record();
        events
    }

    /// Adds a source of doorbell writes to I/O thread `worker`, the one that
    /// [`write_doorbell`](Self::write_doorbell) has returned. While the I/O thread sleeps, it
    /// receives doorbell writes of its I/O queues from `source`. It drops the source when the
    /// controller is reset, when another source is added, or after several wakeups in a row without
    /// a doorbell write.
    pub fn add_doorbell_source(&self, worker: usize, source: Box<dyn DoorbellSource>) {
        let Context { shared, pool, .. } = &self.0.context;
        pool.send(worker, Message::DoorbellSource { controller: shared.id, source });
    }

    /// Number of interrupt vectors.
    #[must_use]
    pub fn vectors(&self) -> usize {
        self.0.context.shared.irqs.len()
    }

    /// Connects an interrupt vector to an eventfd, or disconnects it. If the interrupt was raised
    /// while no eventfd was connected, it is delivered immediately. Returns false if the vector
    /// does not exist.
    pub fn set_interrupt(&self, vector: usize, event: Option<EventFd>) -> bool {
        self.0.context.shared.irqs.set(vector, event)
    }

    /// Eventfd of an interrupt vector, if connected.
    #[must_use]
    pub fn interrupt(&self, vector: usize) -> Option<Arc<EventFd>> {
        self.0.context.shared.irqs.event(vector)
    }

    /// Raises an interrupt vector. Returns false if the vector does not exist.
    pub fn trigger_interrupt(&self, vector: usize) -> bool {
        self.0.context.shared.irqs.trigger(vector)
    }
}

/// DMA maps of host memory, and dirty page logging.
impl Controller {
    /// Maps `len` bytes of `memory` at `iova` for the controller.
    ///
    /// # Errors
    /// [`DmaError`] if the range is invalid or in use.
    pub fn map_dma(&self, iova: u64, len: u64, memory: &SharedBytes) -> Result<(), DmaError> {
        let mut control = self.0.control();
        control.map(iova, len, memory)?;
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
        Ok(())
    }

    /// Adds one of several maps, like [`map_dma`](Self::map_dma). After the last map, the caller
    /// must call [`publish_dma`](Self::publish_dma) to make all of them accessible. So I/O threads
    /// switch to a new DMA table once, and not once per map.
    ///
    /// # Errors
    /// [`DmaError`] if the range is invalid or in use.
    pub fn add_dma(&self, iova: u64, len: u64, memory: &SharedBytes) -> Result<(), DmaError> {
        let mut control = self.0.control();
        let outcome = control.map(iova, len, memory);
        self.0.release(control, Deferred::default());
        outcome
    }

    /// Makes the ranges of [`add_dma`](Self::add_dma) accessible.
    pub fn publish_dma(&self) {
        let mut control = self.0.control();
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
    }

    /// Enables access to the mapped memory, which is the initial state. The duration does not
    /// depend on the size of the memory.
    pub fn enable_dma(&self) {
        let mut control = self.0.control();
        control.enable_memory();
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
    }

    /// Disables access to current and later maps until [`enable_dma`](Self::enable_dma). `done` is
    /// as for [`unmap_dma`](Self::unmap_dma).
    pub fn disable_dma(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.disable_memory(cx, Box::new(done)));
    }

    /// DMA table of all maps. Memory that is in the table stays mapped in this process until the
    /// last reference to the table is dropped.
    #[must_use]
    pub fn dma_table(&self) -> Arc<DmaTable> {
        Arc::clone(self.0.control().mapped())
    }

    /// Enables or disables dirty page logging of the controller's writes. `done` runs as for
    /// [`renew_views`](Self::renew_views); from then on, all writes are logged. If the setting is
    /// unchanged, returns false and drops `done`.
    ///
    /// Whenever the log is read, completion queues and EventIdx count as dirty.
    pub fn log_writes(&self, log: bool, done: impl FnOnce() + Send + 'static) -> bool {
        let mut control = self.0.control();
        let Some(deferred) = control.set_logged(&self.0.context, log, Box::new(done)) else {
            return false;
        };
        self.0.release(control, deferred);
        true
    }

    /// Completes the [dirty page log](Self::dirty_log) for all earlier writes. `done` runs on any
    /// thread, when all commands that are in flight at the call have ended. It may be dropped
    /// without a call, as for [`unmap_dma`](Self::unmap_dma).
    pub fn renew_views(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.renew_views(cx, Box::new(done)));
    }

    /// Dirty page log, if [enabled](Self::log_writes).
    #[must_use]
    pub fn dirty_log(&self) -> Option<Arc<DirtyLog>> {
        self.0.control().dirty_log()
    }

    /// Unmaps a range. `done` runs on any thread, when no command in flight can access the range;
    /// this can be before the method returns. If the last handle of the controller is dropped
    /// earlier, `done` is dropped without a call.
    ///
    /// # Errors
    /// [`DmaError`] if the range is not mapped, or a map would be split; `done` does not run in
    /// that case.
    pub fn unmap_dma(
        &self,
        iova: u64,
        len: u64,
        done: impl FnOnce() + Send + 'static,
    ) -> Result<(), DmaError> {
        let mut control = self.0.control();
        let deferred = control.unmap(&self.0.context, iova, len, Box::new(done))?;
        self.0.release(control, deferred);
        Ok(())
    }

    /// Unmaps all ranges. `done` is as for [`unmap_dma`](Self::unmap_dma).
    pub fn unmap_all(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| {
            let mut deferred = Deferred::default();
            control.unmap_all(cx, Box::new(done), &mut deferred);
            deferred
        });
    }
}

/// Adding, removing and changing namespaces while the host uses the controller.
impl Controller {
    /// Current namespaces in ascending order of NSID.
    #[must_use]
    pub fn namespaces(&self) -> Vec<(u32, NamespaceConfig)> {
        self.0.context.serving().iter().map(|ns| (ns.nsid(), ns.config())).collect()
    }

    /// Adds a namespace while the host uses the controller, with this NSID or with the lowest free
    /// one. Returns its NSID. When every I/O thread serves the namespace, it appears in Identify,
    /// the host gets the event Namespace Attribute Changed, and `done` runs. `done` runs on any
    /// thread, possibly before this method returns. If an I/O thread cannot open the disk, the
    /// namespace is not added, and `done` gets the error. If the last handle of the controller is
    /// dropped earlier, `done` is dropped without a call.
    ///
    /// If Identify has reported no volatile write cache, the host never sends Flush. Every write to
    /// an added namespace with a cache is then forced to the medium.
    ///
    /// # Errors
    /// [`NamespaceError`]; `done` does not run in that case.
    pub fn add_namespace(
        &self,
        nsid: Option<u32>,
        namespace: &NamespaceConfig,
        done: impl FnOnce(Result<(), NamespaceError>) + Send + 'static,
    ) -> Result<u32, NamespaceError> {
        let mut control = self.0.control();
        let added = control.add_namespace(&self.0.context, nsid, namespace, Box::new(done));
        let (nsid, deferred) = added?;
        self.0.note_change();
        self.0.release(control, deferred);
        Ok(nsid)
    }

    /// Sets the state of an ANA group (1 or higher) for this controller. The controller must belong
    /// to a [`Subsystem`](crate::Subsystem). The host gets the event Asymmetric Namespace Access
    /// Change, if it has enabled that event. Later commands for the group's namespaces are executed
    /// or refused according to the state. Commands in flight end normally. `done` runs when they
    /// have ended. If the controller is dropped earlier, `done` is dropped without a call.
    pub fn set_ana_state(&self, group: u32, state: AnaState, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.set_ana_state(cx, (group, state), Box::new(done)));
    }

    /// ANA groups of the controller's namespaces with states and NSIDs; empty if the controller
    /// does not belong to a [`Subsystem`](crate::Subsystem).
    #[must_use]
    pub fn ana_groups(&self) -> Vec<AnaGroup> {
        self.0.control().ana_groups(&self.0.context)
    }

    /// Removes a namespace while the host uses the controller. The host gets the event Namespace
    /// Attribute Changed immediately. Commands for the namespace, including those in flight, end
    /// with Invalid Field in Command, as for any inactive NSID. `done` runs when the controller has
    /// dropped the disk, on a thread as for [`add_namespace`](Self::add_namespace).
    ///
    /// # Errors
    /// [`NamespaceError`]; `done` does not run in that case.
    pub fn remove_namespace(
        &self,
        nsid: u32,
        done: impl FnOnce(Result<(), NamespaceError>) + Send + 'static,
    ) -> Result<(), NamespaceError> {
        let mut control = self.0.control();
        let deferred = control.remove_namespace(&self.0.context, nsid, Box::new(done))?;
        self.0.note_change();
        self.0.release(control, deferred);
        Ok(())
    }

    /// Replaces the disk of a namespace by `disk` with the same contents, usually in another size
    /// ([`Disk::resized`]) or read-only. Commands in flight end on the old disk. The host gets the
    /// event Namespace Attribute Changed. For a smaller disk, it gets the event immediately; for a
    /// larger one, when every I/O thread serves the new disk. `done` runs when the old disk is
    /// unused, on a thread as for [`add_namespace`](Self::add_namespace).
    ///
    /// # Errors
    /// [`NamespaceError`]; `done` does not run in that case.
    pub fn change_disk(
        &self,
        nsid: u32,
        disk: Arc<dyn Disk>,
        done: impl FnOnce(Result<(), NamespaceError>) + Send + 'static,
    ) -> Result<(), NamespaceError> {
        let mut control = self.0.control();
        let deferred = control.change_disk(&self.0.context, nsid, disk, Box::new(done))?;
        self.0.note_change();
        self.0.release(control, deferred);
        Ok(())
    }

    /// Raises the event Namespace Attribute Changed again after a recovery. The dead process may
    /// have crashed between a change and its event.
    pub fn announce_namespace(&self, nsid: u32) {
        self.0.with(|control, _| {
            control.announce_namespace(nsid);
            Deferred::default()
        });
        self.0.schedule();
    }
}

/// Quiesce, restore, migration and crash recovery.
impl Controller {
    /// Quiesces the controller, so that another process can continue it. First, admin commands in
    /// flight end and no new one starts. Then no I/O command is fetched, and I/O commands in flight
    /// end. Commands that the host submits meanwhile wait in its queues. `done` runs on any thread,
    /// when the controller is quiesced. It is dropped without a call if [`resume`](Self::resume) is
    /// called or the last handle of the controller is dropped before that.
    ///
    /// The quiesce waits for pending operations of the front end, such as a reset or an unmap. The
    /// front end should not start new operations, because they would run after `resume` or never.
    pub fn freeze(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, _| control.begin_quiesce(Box::new(done)));
        self.0.schedule();
    }

    /// Ends the quiesce of [`freeze`](Self::freeze), or cancels it if it is not complete. The
    /// controller then serves its queues again.
    pub fn resume(&self) {
        let dropped = self.0.control().end_quiesce(&self.0.context);
        drop(dropped);
        self.0.schedule();
    }

    /// Snapshot of the quiesced controller for another process. The controller is not changed. The
    /// front end has to transfer host memory and interrupts, which are not included.
    ///
    /// # Errors
    /// [`SaveError`].
    pub fn save(&self, fds: &mut Descriptors) -> Result<SavedController, SaveError> {
        self.0.save(fds)
    }

    /// Restores a snapshot and runs the controller. The call must be the last step of the front
    /// end, because commands are fetched immediately. This controller must be a
    /// [`successor`](Self::successor), and the saved one must not be [resumed](Self::resume).
    ///
    /// Each interrupt vector in use is raised once, because the saved controller may have held back
    /// an interrupt.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller is then unusable, and has not accessed host memory.
    pub fn restore(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        self.restore_quiesced(saved, fds)?;
        self.resume();
        Ok(())
    }

    /// Restores a snapshot like [`restore`](Self::restore), but leaves the controller quiesced:
    /// no command is fetched before [`resume`](Self::resume).
    ///
    /// # Errors
    /// As for `restore`.
    pub fn restore_quiesced(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        self.0.restore(saved, fds)
    }

    /// Snapshot of the [quiesced](Self::freeze) controller for a controller on another machine,
    /// with the same configuration and the same disks. As for [`save`](Self::save), host memory and
    /// interrupts are not included, and the controller is not changed.
    ///
    /// # Errors
    /// [`SaveError`].
    pub fn save_for_migration(&self) -> Result<MigrationState, SaveError> {
        self.0.save_for_migration()
    }

    /// Loads a migrated state into this controller, and leaves it quiesced. The controller must be
    /// disabled, for example by a [`reset`](Self::reset). The state is validated, because its
    /// sender is not trusted. The caller must call [`run_migrated`](Self::run_migrated) afterwards,
    /// with the returned value.
    ///
    /// # Errors
    /// [`RestoreError`]. The controller has not accessed host memory, and must then be reset.
    pub fn load_migrated(&self, migrated: MigrationState) -> Result<Announcement, RestoreError> {
        self.0.load(migrated).map(Announcement)
    }

    /// Runs a controller after [`load_migrated`](Self::load_migrated), when all host memory has its
    /// final contents. Each interrupt vector in use is raised once, because the controller on the
    /// source machine may have held back an interrupt.
    pub fn run_migrated(&self, announcement: Announcement) {
        // With the new DMA table, the queues also write EventIdx to host memory again.
        self.publish_dma();
        self.resume();
        self.0.raise(&announcement.0);
    }

    /// Starts checkpointing the controller to `recorder`, for crash recovery. It must be called
    /// before the controller is enabled, [restored](Self::restore) or [recovered](Self::recover).
    /// State that changes with every command is not in checkpoints, but in a memory file (the
    /// journal), whose descriptor each checkpoint contains.
    ///
    /// # Errors
    /// The memory file could not be created.
    pub fn record_with(&self, recorder: Arc<dyn Recorder>) -> io::Result<()> {
        self.0.record_with(recorder)
    }

    /// I/O commands in flight at disks, from the journal. Empty without a
    /// [recorder](Self::record_with). The call does not involve I/O threads. While a reset waits
    /// for commands, these are the commands from before the reset.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn in_flight(&self) -> io::Result<Vec<InFlightCommand>> {
        let Some(journal) = self.0.context.shared.journal() else { return Ok(Vec::new()) };
        let generation = self.0.control().commands_generation();
        journal.in_flight(generation)
    }

    /// True if the command with this [identifier](InFlightCommand::id) is from before a reset, and
    /// that reset no longer waits for commands.
    #[must_use]
    pub fn has_dropped(&self, id: u64) -> bool {
        !crate::journal::is_of(id, self.0.control().commands_generation())
    }

    /// Recovers the controller of a dead process from its [checkpoint](Self::record_with). All
    /// threads of the process must have ended, and none of its requests may still reach a disk or
    /// host memory. This controller must be a [`successor`](Self::successor) with a recorder of its
    /// own. When the method returns, the checkpoint of this controller is complete, and the
    /// checkpoint of the dead process is no longer needed. The controller stays quiesced until
    /// [`resume`](Self::resume). After that, the caller must call
    /// [`announce_recovery`](Self::announce_recovery).
    ///
    /// Commands that were in flight when the process died are executed again; their number is
    /// returned. A command with which three processes in a row have crashed is completed with
    /// Internal Error instead, and logged. `death` is the cause of the last death.
    ///
    /// # Errors
    /// [`RestoreError`]. The controller has not accessed host memory, and is then unusable.
    pub fn recover(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
        death: CauseOfDeath,
    ) -> Result<usize, RestoreError> {
        self.0.recover(saved, fds, death)
    }

    /// Raises each interrupt vector of a [recovered](Self::recover) controller once, because the
    /// dead process may have held back an interrupt. It takes some microseconds per vector, so it
    /// is called when all controllers are served again, after [`resume`](Self::resume).
    pub fn announce_recovery(&self, saved: &SavedController) {
        self.0.announce(saved);
    }
}
