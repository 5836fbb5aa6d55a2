//! The controller as whoever carries it to a host sees it: registers, doorbells, interrupts, DMA.

use crate::config::{Config, ConfigError, MAX_NAMESPACES, NamespaceConfig};
use crate::context::Context;
use crate::control::{Callback, Deferred, DoorbellEventfds, NamespaceError};
use crate::doorbell_source::DoorbellSource;
use crate::event::Listener;
use crate::inquiry::Inquiry;
use crate::migrated::MigratedController;
use crate::namespace::{Namespaces, Promises};
use crate::notice::{ControlHandle, ControlPlane};
use crate::plane::ControllerInner;
use crate::recorder::Recorder;
use crate::route::RelocateError;
use crate::saved::{Death, SavedController, SavedPromises};
use crate::shared::{ControllerShared, DOORBELL_BYTES, DSTRD, MAX_QUEUES};
use crate::stats::Stats;
use crate::successor::{RestoreError, SaveError};
use crate::trace::{COMPLETION_QUEUE, Kind};
use crate::worker::message::Message;
use crate::worker::{Pool, ThreadJob};
use shadowbell_backend::Disk;
use shadowbell_memory::{DirtyLog, DmaError, DmaTable, EventFd, SharedBytes};
use shadowbell_spec::Status;
use shadowbell_spec::log::{AnaGroup, AnaState};
use shadowbell_spec::regs::{DOORBELLS, DoorbellKind, decode_doorbell};
use shadowbell_state::Descriptors;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Weak};

/// Bytes of BAR0: a page of registers, a page of doorbells.
pub const BAR0_BYTES: u64 = DOORBELLS + DOORBELL_BYTES;

/// Why a controller could not be made.
#[derive(Debug, thiserror::Error)]
pub enum NewError {
    /// The configuration is not possible.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// There was no memory for the doorbells.
    #[error(transparent)]
    Memory(#[from] shadowbell_memory::MapError),
}

/// How a controller is carried to its host.
#[derive(Default)]
pub struct Carrier {
    /// The host maps the page of doorbells and writes it itself: nothing traps, so the workers
    /// look at least every millisecond.
    pub mapped_doorbells: bool,
    /// Is called with what happens, on whatever thread it happens.
    pub listener: Option<Listener>,
}

impl fmt::Debug for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carrier").field("mapped_doorbells", &self.mapped_doorbells).finish()
    }
}

/// An NVMe controller, not attached to any transport: a VFIO-user server, or a driver in the same
/// process, reads and writes its registers and maps its memory.
///
/// Cloning gives another handle on the same controller. All methods may be called from any thread;
/// none of them waits for I/O.
#[derive(Clone)]
pub struct Controller(Arc<ControllerInner>);

/// The interrupts that a controller raises when it [runs](Controller::run_migrated) elsewhere.
#[derive(Debug, Default)]
pub struct Announcement(Vec<u16>);

static NEXT_ID: AtomicU32 = AtomicU32::new(1);

impl Controller {
    /// Makes a controller, disabled, served by `pool`.
    ///
    /// # Errors
    /// [`NewError`], if the configuration is not possible.
    pub fn new(config: Config, pool: Pool, carrier: Carrier) -> Result<Self, NewError> {
        config.validate()?;
        let namespaces = Namespaces::new(&config);
        if let Some(member) = &config.member {
            member.power_on();
        }
        Ok(Self::with_doorbells(config, namespaces, pool, carrier, None)?)
    }

    /// Makes a controller that goes on where another one, in this process or in one that is about
    /// to end, has come to [rest](Self::freeze). `config` and `carrier` have to be for the host
    /// what they were there.
    ///
    /// It has the doorbells of the other one, and is disabled until [`restore`](Self::restore).
    /// Before that the host's memory is mapped and its interrupts are connected, as they were.
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
        let namespaces = match saved.shape.told {
            None => Namespaces::new(&config),
            Some(SavedPromises { highest_nsid, volatile_cache, zeroes }) => {
                let promises = Promises { volatile_cache, zeroes };
                Namespaces::going_on(&config, promises, highest_nsid.min(MAX_NAMESPACES as u32))
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
        let shared =
            Arc::new(ControllerShared::new(id, carrier.mapped_doorbells, pool.most(), doorbells)?);
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

    /// Reads BAR0. Registers are little-endian; any length and alignment inside [`BAR0_BYTES`] is
    /// answered, and bytes beyond are zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        // Doorbells read as zero: what they return is vendor specific (PCIe 1.1, 3.1.2.1).
        if offset < DOORBELLS {
            self.0.control().read(offset, data);
        }
    }

    /// Writes BAR0. Registers take aligned accesses of 4 bytes, or of 8 where a register has 8;
    /// others are ignored, as the specification leaves them undefined.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if offset >= DOORBELLS {
            if let Ok(value) = data.try_into().map(u32::from_le_bytes) {
                self.write_doorbell(offset, value);
            }
            return;
        }
        self.0.with(|control, cx| control.write(cx, offset, data));
    }

    /// A trapped write of a doorbell: `offset` is the one in BAR0. Which worker this has woken, if
    /// it has woken one.
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
        if doorbell.qid == 0 {
            shadowbell_doorbell::Cell::store_release(&register, value);
            self.0.schedule();
            return None;
        }
        let Some(worker) = worker else {
            self.invalid_doorbell_register();
            return None;
        };
        let ring = |worker| match doorbell.kind {
            DoorbellKind::Sq => pool.write_doorbell(worker, shared, &register, value),
            DoorbellKind::Cq => {
                shadowbell_doorbell::Cell::store_release(&register, value);
                // Pairs with the sleeper's fence, which follows its `want_head`: either it sees
                // the head in its last look, or we see here that it has to be woken.
                fence(Ordering::SeqCst);
                shared.is_head_wanted(doorbell.qid)
                    && pool.write_doorbell(worker, shared, &register, value)
            }
        };
        let woken = ring(worker);
        // The queue may have gone to another worker meanwhile, which has looked at the register
        // before it was written.
        match shared.owner(doorbell.qid, doorbell.kind) {
            Some(now) if now != worker => ring(now).then_some(now),
            _ => woken.then_some(worker),
        }
    }

    fn invalid_doorbell_register(&self) {
        self.0.with(|control, _| {
            control.invalid_doorbell_register();
            Deferred::default()
        });
    }

    /// Descriptors that stand for writes to doorbells, as of now: those of the I/O queues that
    /// exist, if Doorbell Buffer Config is in force, and none otherwise. A host may signal one
    /// instead of writing any of its doorbells, after it has put the value in its shadow
    /// doorbell buffer.
    ///
    /// They stand for nothing any more when the queue is deleted or the controller reset.
    ///
    /// # Errors
    /// The system's, when it has no more descriptors.
    pub fn doorbell_eventfds(&self) -> io::Result<DoorbellEventfds> {
        let events = self.0.control().doorbell_eventfds(&self.0.context);
        self.0.note_change();
        self.0.record();
        events
    }

    /// Has `worker`, which is one that [`write_doorbell`](Self::write_doorbell) named, take the
    /// host's doorbell writes by itself: those of the I/O queues that it serves, while it
    /// sleeps. It drops the source when the controller is reset, when another is added, or when
    /// it has been woken in vain several times in a row.
    pub fn add_doorbell_source(&self, worker: usize, source: Box<dyn DoorbellSource>) {
        let Context { shared, pool, .. } = &self.0.context;
        pool.send(worker, Message::DoorbellSource { controller: shared.id, source });
    }

    /// Has the controller served by a thread that it shares with nobody, from now on and for as
    /// long as it exists. Commands that are under way end first; others wait in their queues for
    /// that moment, and the host need not know. The controller's owner may want that for a guest
    /// that it trusts less than others, or that has paid for it; a guest that holds up its
    /// neighbours is dealt with so in any case ([`Event::Isolated`](crate::Event::Isolated)).
    ///
    /// # Errors
    /// [`RelocateError`].
    pub fn isolate(&self) -> Result<(), RelocateError> {
        self.0.relocate(|control, cx| control.isolate(cx))
    }

    /// Has the controller served by this worker of its pool, from now on and for as long as it
    /// exists, as [`isolate`](Self::isolate) does.
    ///
    /// # Errors
    /// [`RelocateError`].
    pub fn pin_to(&self, worker: usize) -> Result<(), RelocateError> {
        self.0.relocate(|control, cx| control.pin_to(cx, worker))
    }

    /// Has `job` run on the thread of the worker that serves I/O submission queue `sqid`, as a
    /// [`WorkerThread`](crate::WorkerThread).
    ///
    /// # Errors
    /// There is no such queue, or its worker has another job, or no thread of its own: the job.
    pub fn lend_thread(&self, sqid: u16, job: ThreadJob) -> Result<(), ThreadJob> {
        self.0.lend_thread(sqid, job)
    }

    /// The controller's insides, for what builds on it in this crate.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    pub(crate) fn inner(&self) -> &Arc<ControllerInner> {
        &self.0
    }

    /// The page of doorbell registers (BAR0 from 1000h on), backed by a memfd. Only to be mapped
    /// by a host if the controller was made with [`Carrier::mapped_doorbells`].
    #[must_use]
    pub fn doorbells(&self) -> &SharedBytes {
        self.0.context.shared.doorbells()
    }

    /// Whether the controller expects its doorbells to be mapped.
    #[must_use]
    pub fn has_mapped_doorbells(&self) -> bool {
        self.0.context.shared.mapped
    }

    /// What the controller was made from, without its namespaces: see
    /// [`namespaces`](Self::namespaces).
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.context.config
    }

    /// The namespaces as they are now, in the order of their NSIDs.
    #[must_use]
    pub fn namespaces(&self) -> Vec<(u32, NamespaceConfig)> {
        self.0.context.serving().iter().map(|ns| (ns.nsid(), ns.config())).collect()
    }

    /// Adds a namespace while the host uses the controller: at this NSID, or at the lowest that is
    /// free. Its NSID. The host finds it in Identify, and is told by the event Namespace Attribute
    /// Changed, when every worker serves it; then `done` runs, on any thread, perhaps before this
    /// returns. If a worker can not open the disk, none of that happens, and `done` is told. It is
    /// dropped instead if the last handle of the controller is dropped before.
    ///
    /// A host that has been told that there is no volatile write cache does not flush: every write
    /// to a namespace that has one is forced to the medium then.
    ///
    /// # Errors
    /// [`NamespaceError`]; `done` does not run then.
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

    /// Has an ANA group, from 1, be in this state for this controller, which is one of a
    /// [`Subsystem`](crate::Subsystem). The host is told by the event Asymmetric Namespace Access
    /// Change, if it wants to know. Commands that come for the group's namespaces from here on are
    /// carried out or refused as the state has it; those that are under way end as they would have.
    /// `done` runs when none of them is left; it is dropped if the controller goes before.
    pub fn set_ana_state(&self, group: u32, state: AnaState, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.set_ana_state(cx, (group, state), Box::new(done)));
    }

    /// The ANA groups of its namespaces, each with its state and its NSIDs; nothing if the
    /// controller is not one of a [`Subsystem`](crate::Subsystem).
    #[must_use]
    pub fn ana_groups(&self) -> Vec<AnaGroup> {
        self.0.control().ana_groups(&self.0.context)
    }

    /// Removes a namespace while the host uses the controller. It is told by the event Namespace
    /// Attribute Changed at once. Commands that are under way for the namespace, and those that
    /// come for it, end with Invalid Field in Command, as for any NSID that is not active. `done`
    /// as for [`add_namespace`](Self::add_namespace), when nothing uses the disk any more, and
    /// nobody here has it.
    ///
    /// # Errors
    /// As there.
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

    /// Has a namespace on `disk` from here on: the same bytes in another size, most likely
    /// ([`Disk::resized`]), or read-only. Commands that are under way end on the disk that they
    /// were begun on. The host is told by the event Namespace Attribute Changed: of a smaller disk
    /// at once, of a larger one when every worker serves it. `done` as for
    /// [`add_namespace`](Self::add_namespace), when nothing uses the disk of before any more.
    ///
    /// # Errors
    /// As there.
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

    /// Tells the host once more that a namespace has changed: a process before this one may have
    /// died between the change and the event.
    pub fn announce_namespace(&self, nsid: u32) {
        self.0.with(|control, _| {
            control.announce_namespace(nsid);
            Deferred::default()
        });
        self.0.schedule();
    }

    /// How many interrupt vectors the controller has.
    #[must_use]
    pub fn vectors(&self) -> usize {
        self.0.context.shared.irqs.len()
    }

    /// Connects an interrupt vector to an eventfd, or disconnects it. An interrupt that was raised
    /// while there was none is delivered now. False if there is no such vector.
    pub fn set_interrupt(&self, vector: usize, event: Option<EventFd>) -> bool {
        self.0.context.shared.irqs.set(vector, event)
    }

    /// The eventfd that a vector is connected to, if it is.
    #[must_use]
    pub fn interrupt(&self, vector: usize) -> Option<Arc<EventFd>> {
        self.0.context.shared.irqs.event(vector)
    }

    /// Raises a vector, as if a queue had. False if there is no such vector.
    pub fn trigger_interrupt(&self, vector: usize) -> bool {
        self.0.context.shared.irqs.trigger(vector)
    }

    /// Makes `len` bytes of `memory` reachable for the controller at `iova`.
    ///
    /// # Errors
    /// [`DmaError`], if the range is bad or in use.
    pub fn map_dma(&self, iova: u64, len: u64, memory: &SharedBytes) -> Result<(), DmaError> {
        let mut control = self.0.control();
        control.map(iova, len, memory)?;
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
        Ok(())
    }

    /// As [`map_dma`](Self::map_dma), for one of several ranges: they are reachable after
    /// [`settle_dma`](Self::settle_dma), at the latest. So the workers take over one other map, and
    /// not as many as there are ranges.
    ///
    /// # Errors
    /// [`DmaError`], if the range is bad or in use.
    pub fn add_dma(&self, iova: u64, len: u64, memory: &SharedBytes) -> Result<(), DmaError> {
        let mut control = self.0.control();
        let outcome = control.map(iova, len, memory);
        self.0.release(control, Deferred::default());
        outcome
    }

    /// Makes reachable what was [added](Self::add_dma).
    pub fn settle_dma(&self) {
        let mut control = self.0.control();
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
    }

    /// Lets the controller use the memory that is mapped, as it may from the beginning. However
    /// much that is, it takes no time.
    pub fn enable_dma(&self) {
        let mut control = self.0.control();
        control.enable_memory();
        control.publish_table(&self.0.context, None);
        self.0.release(control, Deferred::default());
    }

    /// Lets the controller use no memory until [`enable_dma`](Self::enable_dma), whatever is or
    /// will be mapped. `done` as for [`unmap_dma`](Self::unmap_dma).
    pub fn disable_dma(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.disable_memory(cx, Box::new(done)));
    }

    /// Everything that is mapped. Whoever drops that last lets go of all the memory in it.
    #[must_use]
    pub fn dma_table(&self) -> Arc<DmaTable> {
        Arc::clone(self.0.control().mapped())
    }

    /// From now on, the pages of the host's memory that the controller writes are noted; or not any
    /// more. `done` as for [`renew_views`](Self::renew_views): whatever is written after that is
    /// noted. False, and `done` is dropped, if it was so already.
    ///
    /// Completion queues and EventIdx count as written whenever the log is looked at.
    pub fn log_writes(&self, log: bool, done: impl FnOnce() + Send + 'static) -> bool {
        let mut control = self.0.control();
        let Some(deferred) = control.set_logged(&self.0.context, log, Box::new(done)) else {
            return false;
        };
        self.0.release(control, deferred);
        true
    }

    /// Has everything that was written until now in the [log](Self::dirty_log): `done` runs, on any
    /// thread, when no command is in flight any more that is in flight now. As for
    /// [`unmap_dma`](Self::unmap_dma), it may be dropped instead.
    pub fn renew_views(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.renew_views(cx, Box::new(done)));
    }

    /// The pages that were [noted](Self::log_writes), if any are.
    #[must_use]
    pub fn dirty_log(&self) -> Option<Arc<DirtyLog>> {
        self.0.control().dirty_log()
    }

    /// Takes a range away. `done` runs, on any thread, when no command in flight can touch it any
    /// more; that may be before this returns. It is dropped instead if the last handle of the
    /// controller is dropped before.
    ///
    /// # Errors
    /// [`DmaError`], if nothing is mapped there or a map would be split; `done` does not run then.
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

    /// Takes every range away; `done` as for [`unmap_dma`](Self::unmap_dma).
    pub fn unmap_all(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| {
            let mut deferred = Deferred::default();
            control.unmap_all(cx, Box::new(done), &mut deferred);
            deferred
        });
    }

    /// A reset from outside: function level, or the transport's own. Registers go back to their
    /// power-on values; DMA maps and interrupt vectors stay. `done` runs, on any thread, when
    /// nothing of the controller is in flight any more; it is dropped instead if the last handle of
    /// the controller is dropped before.
    pub fn reset(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.reset(cx, Box::new(done)));
    }

    /// The host is gone: a reset, after which its memory and its interrupts are forgotten too.
    /// `done` runs, on any thread, when nothing touches that memory any more.
    pub fn disconnect(&self, done: impl FnOnce() + Send + 'static) {
        // The controller stays until then, whoever else lets go of it.
        let inner = Arc::clone(&self.0);
        let done: Callback = Box::new(move || {
            done();
            drop(inner);
        });
        self.0.with(|control, cx| control.disconnect(cx, done));
    }

    /// Has the controller come to rest, so that another process can go on with it: admin commands
    /// that are under way end, no new one is begun; then no I/O command is fetched any more, and
    /// those in flight end. What the host submits meanwhile waits in its queues. `done` runs, on
    /// any thread, when that is so; it is dropped instead if [`resume`](Self::resume) is called
    /// before, or the last handle of the controller dropped.
    ///
    /// Whoever carries the controller must not have anything under way that it waits for (a reset,
    /// an unmap), or `done` waits for that as well; and should not bring anything new: it would be
    /// carried out after `resume`, or never.
    pub fn freeze(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, _| control.begin_rest(Box::new(done)));
        self.0.schedule();
    }

    /// Goes on after [`freeze`](Self::freeze), as if nothing had been; also before that has come to
    /// its end.
    pub fn resume(&self) {
        let dropped = self.0.control().end_rest(&self.0.context);
        drop(dropped);
        self.0.schedule();
    }

    /// What another process needs to go on with this controller, which is at rest. Nothing of it
    /// is changed. The host's memory and its interrupts are not part of it: they are whoever's who
    /// carries the controller.
    ///
    /// # Errors
    /// [`SaveError`].
    pub fn save(&self, fds: &mut Descriptors) -> Result<SavedController, SaveError> {
        self.0.save(fds)
    }

    /// Goes on from there: as the last step, for it fetches commands at once. This controller was
    /// made by [`successor`](Self::successor), and the other one is never
    /// [resumed](Self::resume).
    ///
    /// Each interrupt vector in use is raised once, because the other one may have held one back.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller is of no use then, and has touched nothing.
    pub fn restore(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        self.restore_at_rest(saved, fds)?;
        self.resume();
        Ok(())
    }

    /// As [`restore`](Self::restore), but at rest: nothing is fetched before
    /// [`resume`](Self::resume).
    ///
    /// # Errors
    /// As of `restore`.
    pub fn restore_at_rest(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
    ) -> Result<(), RestoreError> {
        self.0.restore(saved, fds)
    }

    /// What a controller like this one needs on another machine to go on with this one, which is
    /// [at rest](Self::freeze): its namespaces have to be the same disks there. As with
    /// [`save`](Self::save), memory and interrupts are not part of it, and nothing is changed.
    ///
    /// # Errors
    /// [`SaveError`].
    pub fn save_for_migration(&self) -> Result<MigratedController, SaveError> {
        self.0.save_for_migration()
    }

    /// Goes on from there, at rest: this controller is disabled, after a [`reset`](Self::reset) at
    /// the latest. Whoever has sent the state may be anybody. [`run_migrated`](Self::run_migrated)
    /// has to follow, with what this returns.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller has to be reset then, and has touched nothing.
    pub fn load_migrated(
        &self,
        migrated: MigratedController,
    ) -> Result<Announcement, RestoreError> {
        self.0.load(migrated).map(Announcement)
    }

    /// Has a controller that was [loaded](Self::load_migrated) run: all of the host's memory is
    /// there as the other one has left it. Each interrupt vector in use is raised once, because the
    /// other one may have held one back.
    pub fn run_migrated(&self, announcement: Announcement) {
        // What the queues have in the host's memory is written anew.
        self.settle_dma();
        self.resume();
        self.0.raise(&announcement.0);
    }

    /// What Identify or Get Log Page shows the host, for somebody else, who needs no queue and may
    /// ask at any time. Nothing changes by it.
    ///
    /// # Errors
    /// The status that the command would complete with.
    pub fn inquire(&self, inquiry: Inquiry) -> Result<Vec<u8>, Status> {
        self.0.control().inquire(&self.0.context, inquiry)
    }

    /// Has `recorder` keep what the controller is, from now on, in case that this process dies. To
    /// be called before the controller is enabled, [restored](Self::restore) or
    /// [recovered](Self::recover). What changes with every command is not recorded but lies in a
    /// memory file, which is one of the descriptors of the record.
    ///
    /// # Errors
    /// There is no memory for that file.
    pub fn record_with(&self, recorder: Arc<dyn Recorder>) -> io::Result<()> {
        self.0.record_with(recorder)
    }

    /// Goes on from the [record](Self::record_with) of a controller whose process has died, with
    /// all of its threads, and of whose requests none can reach the disk or the host's memory any
    /// more. This controller was made by [`successor`](Self::successor) and is recorded itself.
    /// It is at rest until [`resume`](Self::resume): the new record is complete, and the old one
    /// not needed any more. Then its host is to be [interrupted](Self::announce_recovery).
    ///
    /// Commands that were under way are carried out again. How many that are. One with which three
    /// processes have died by a fault, one after the other, is completed with an Internal Error
    /// instead, and the log says so: `death` is how the last one has died.
    ///
    /// # Errors
    /// [`RestoreError`]; the controller is of no use then, and has touched nothing.
    pub fn recover(
        &self,
        saved: &SavedController,
        fds: &mut Descriptors,
        death: Death,
    ) -> Result<usize, RestoreError> {
        self.0.recover(saved, fds, death)
    }

    /// Raises each interrupt vector once of a controller that [goes on](Self::recover): what the
    /// process before has announced is not known. To be called after [`resume`](Self::resume),
    /// when everything is served: it takes some microseconds for each vector.
    pub fn announce_recovery(&self, saved: &SavedController) {
        self.0.announce(saved);
    }

    /// The most notices of workers that have waited for the control plane at a time, since this was
    /// last asked. For the fuzz targets of this workspace, which bound it.
    #[doc(hidden)]
    #[must_use]
    pub fn most_notices(&self) -> usize {
        self.0.most_notices()
    }

    /// The counters, as of now. They are read where they are counted: nobody is asked or woken, and
    /// nothing that holds up a worker holds up this. What a host can see was counted before it
    /// could; the numbers of a controller that is busy are not all of the same moment.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let Context { shared, pool, .. } = &self.0.context;
        shared.stats(|worker| pool.sleep_stats(worker))
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
