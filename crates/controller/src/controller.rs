//! The controller as whoever carries it to a host sees it: registers, doorbells, interrupts, DMA.

use crate::config::{Config, ConfigError};
use crate::control::{Control, Deferred};
use crate::latch::Latch;
use crate::namespace::Namespace;
use crate::shared::{DOORBELL_BYTES, DSTRD, MAX_QUEUES, Report, Reporter, Shared};
use crate::stats::Stats;
use crate::trace::{COMPLETION_QUEUE, Kind};
use crate::worker::message::Message;
use crate::worker::{Pool, Service};
use shadowbell_memory::{DmaError, EventFd, SharedBytes};
use shadowbell_spec::regs::{DOORBELLS, DoorbellKind, decode_doorbell};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Bytes of BAR0: a page of registers, a page of doorbells.
pub const BAR0_BYTES: u64 = DOORBELLS + DOORBELL_BYTES;

/// Something that the owner of a controller may want to tell a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A host set CC.EN, and the controller is ready.
    Enabled,
    /// The host configured shadow doorbells.
    ShadowDoorbells,
    /// The host created its first I/O queue, or another one: how many submission queues exist.
    QueueCreated(usize),
    /// A write found no room on the storage of this namespace: told once in a while.
    Full(u32),
    /// Data that were written to this namespace may be lost: told once in a while.
    Lost(u32),
    /// The host has shut the controller down.
    Shutdown,
    /// The controller was reset; no command is in flight any more.
    Disabled,
    /// The controller can not go on until it is reset, and why.
    Fatal(&'static str),
}

type Listener = Box<dyn Fn(&Event) + Send + Sync>;

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
    /// look at least every quarter of a millisecond.
    pub mapped_doorbells: bool,
    /// Hears what happens.
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
pub struct Controller(Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) me: Weak<Inner>,
    pub(crate) config: Config,
    pub(crate) namespaces: Arc<Vec<Namespace>>,
    pub(crate) shared: Arc<Shared>,
    pub(crate) pool: Pool,
    listener: Option<Listener>,
    control: Mutex<Control>,
}

static NEXT_ID: AtomicU32 = AtomicU32::new(1);

impl Controller {
    /// Makes a controller, disabled, served by `pool`.
    ///
    /// # Errors
    /// [`NewError`], if the configuration is not possible.
    pub fn new(config: Config, pool: Pool, carrier: Carrier) -> Result<Self, NewError> {
        config.validate()?;
        let namespaces: Vec<Namespace> = config
            .namespaces
            .iter()
            .enumerate()
            .map(|(index, ns)| Namespace::new(index as u32 + 1, ns))
            .collect();
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let shared = Arc::new(Shared::new(id, carrier.mapped_doorbells, pool.len())?);
        let control = Control::new(&config, id);
        let inner = Arc::new_cyclic(|me| Inner {
            me: me.clone(),
            config,
            namespaces: Arc::new(namespaces),
            shared,
            pool,
            listener: carrier.listener,
            control: Mutex::new(control),
        });
        let reporter: Weak<dyn Reporter> = inner.me.clone();
        inner.shared.report_to(reporter);
        Ok(Self(inner))
    }

    /// Reads BAR0. Registers are little-endian; any length and alignment inside [`BAR0_BYTES`] is
    /// answered, and bytes beyond are zero.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        // Doorbells read as zero: what they return is vendor specific (PCIe 1.1, 3.1.2.1).
        if offset < DOORBELLS {
            self.0.lock().read(&self.0, offset, data);
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
        let deferred = self.0.lock().write(&self.0, offset, data);
        self.0.run(deferred);
    }

    /// A trapped write of a doorbell: `offset` is the one in BAR0. Which worker this has woken, if it
    /// has woken one.
    pub fn write_doorbell(&self, offset: u64, value: u32) -> Option<usize> {
        let inner = &self.0;
        let doorbell = decode_doorbell(offset, DSTRD);
        let Some(doorbell) = doorbell.filter(|d| usize::from(d.qid) < MAX_QUEUES) else {
            inner.invalid_register();
            return None;
        };
        let worker = inner.shared.trap(doorbell.qid, doorbell.kind);
        let side = if doorbell.kind == DoorbellKind::Cq { COMPLETION_QUEUE } else { 0 };
        inner.note(Kind::MmioWrite, doorbell.qid | side, value, 0);
        let register = inner.shared.register(doorbell.qid, doorbell.kind);
        if doorbell.qid == 0 {
            shadowbell_doorbell::Cell::store_release(&register, value);
            inner.service();
            return None;
        }
        let Some(worker) = worker else {
            inner.invalid_register();
            return None;
        };
        let woken = match doorbell.kind {
            DoorbellKind::Sq => inner.pool.ring(worker, &inner.shared, &register, value),
            DoorbellKind::Cq => {
                shadowbell_doorbell::Cell::store_release(&register, value);
                // Pairs with the sleeper's fence, which follows its `want_head`: either it sees
                // the head in its last look, or we see here that it wants to be told.
                fence(Ordering::SeqCst);
                inner.shared.is_head_wanted(doorbell.qid)
                    && inner.pool.ring(worker, &inner.shared, &register, value)
            }
        };
        woken.then_some(worker)
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// The page of doorbell registers (BAR0 from 1000h on), backed by a memfd. Only to be mapped
    /// by a host if the controller was made with [`Carrier::mapped_doorbells`].
    #[must_use]
    pub fn doorbells(&self) -> &SharedBytes {
        self.0.shared.doorbells()
    }

    /// Whether the controller expects its doorbells to be mapped.
    #[must_use]
    pub fn has_mapped_doorbells(&self) -> bool {
        self.0.shared.mapped
    }

    /// What the controller was made from.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// How many interrupt vectors the controller has.
    #[must_use]
    pub fn vectors(&self) -> usize {
        self.0.shared.irqs.len()
    }

    /// Connects an interrupt vector to an eventfd, or disconnects it. An interrupt that was raised
    /// while there was none is delivered now. False if there is no such vector.
    pub fn set_interrupt(&self, vector: usize, event: Option<EventFd>) -> bool {
        self.0.shared.irqs.set(vector, event)
    }

    /// Raises a vector, as if a queue had. False if there is no such vector.
    pub fn trigger_interrupt(&self, vector: usize) -> bool {
        self.0.shared.irqs.trigger(vector)
    }

    /// Makes `len` bytes of `memory` reachable for the controller at `iova`.
    ///
    /// # Errors
    /// [`DmaError`], if the range is bad or in use.
    pub fn map_dma(&self, iova: u64, len: u64, memory: &SharedBytes) -> Result<(), DmaError> {
        let mut control = self.0.lock();
        control.map(iova, len, memory)?;
        self.0.mapped(control);
        Ok(())
    }

    /// Makes many ranges reachable at once, each of them `(iova, len, memory)`: the workers take over
    /// one other map, and not as many as there are ranges. Those that can not be had go to `refused`,
    /// which must not call this controller.
    pub fn map_dma_all<'a>(
        &self,
        ranges: impl IntoIterator<Item = (u64, u64, &'a SharedBytes)>,
        mut refused: impl FnMut(u64, DmaError),
    ) {
        let mut control = self.0.lock();
        for (iova, len, memory) in ranges {
            if let Err(error) = control.map(iova, len, memory) {
                refused(iova, error);
            }
        }
        self.0.mapped(control);
    }

    /// Takes a range away. `done` runs, on any thread, when no command in flight can touch it any
    /// more; that may be before this returns.
    ///
    /// # Errors
    /// [`DmaError`], if nothing is mapped there or a map would be split; `done` does not run then.
    pub fn unmap_dma(
        &self,
        iova: u64,
        len: u64,
        done: impl FnOnce() + Send + 'static,
    ) -> Result<(), DmaError> {
        let latch = {
            let mut control = self.0.lock();
            control.unmap(iova, len)?;
            let latch = Latch::new(done);
            control.publish_table(&self.0, Some(&latch));
            latch
        };
        drop(latch); // outside of the lock: it may run `done` here
        Ok(())
    }

    /// Takes every range away; `done` as for [`unmap_dma`](Self::unmap_dma).
    pub fn unmap_all(&self, done: impl FnOnce() + Send + 'static) {
        let latch = Latch::new(done);
        let mut control = self.0.lock();
        control.unmap_all();
        control.publish_table(&self.0, Some(&latch));
        drop(control);
    }

    /// A reset from outside: function level, or the transport's own. Registers go back to their
    /// power-on values; DMA maps and interrupt vectors stay. `done` runs, on any thread, when
    /// nothing of the controller is in flight any more.
    pub fn reset(&self, done: impl FnOnce() + Send + 'static) {
        let deferred = self.0.lock().reset(&self.0, Latch::new(done));
        self.0.run(deferred);
    }

    /// The host is gone: a reset, after which its memory and its interrupts are forgotten too.
    pub fn disconnect(&self, done: impl FnOnce() + Send + 'static) {
        let inner = Arc::clone(&self.0);
        self.reset(move || {
            inner.shared.irqs.clear();
            let latch = Latch::new(done);
            let mut control = inner.lock();
            control.unmap_all();
            control.publish_table(&inner, Some(&latch));
            drop(control);
            drop(latch);
        });
    }

    /// The counters, as of now: the workers are asked, which wakes them. Waits for their answer up
    /// to a second; a worker that is held up by its disk for longer is left out.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let gather = Arc::new(Mutex::new(Vec::new()));
        let (answered, wait) = std::sync::mpsc::channel();
        let latch = Latch::new(move || {
            let _ = answered.send(());
        });
        let (mut stats, workers) = {
            let control = self.0.lock();
            (control.admin_stats(&self.0.shared), control.workers())
        };
        for worker in workers {
            let gather = Arc::clone(&gather);
            let controller = self.0.shared.id;
            self.0.pool.send(worker, Message::Query { controller, gather, latch: latch.clone() });
        }
        drop(latch);
        let _ = wait.recv_timeout(Duration::from_secs(1));
        let gathered = std::mem::take(&mut *gather.lock().unwrap_or_else(PoisonError::into_inner));
        self.0.shared.retire(|retired| {
            stats.retired_sq = retired.sq.clone();
            stats.retired_cq = retired.cq.clone();
            stats.io.merge(&retired.io);
            stats.doorbell_events = retired.events;
        });
        for worker in gathered {
            stats.submission_queues.extend(worker.sqs);
            stats.completion_queues.extend(worker.cqs);
            stats.io.merge(&worker.io);
            stats.doorbell_events += worker.events;
            stats.workers.push(worker.sleep);
        }
        stats
    }
}

impl fmt::Debug for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Controller")
            .field("id", &self.0.shared.id)
            .field("serial", &self.0.config.serial)
            .finish_non_exhaustive()
    }
}

impl Inner {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Control> {
        // A panic while the lock was held is a bug, but one controller's, and the others go on.
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells everybody of memory that was mapped.
    fn mapped(&self, mut control: MutexGuard<'_, Control>) {
        let is_back = control.publish_table(self, None);
        drop(control);
        if is_back {
            self.service();
        }
    }

    /// Does what has to be done after the lock was let go.
    pub(crate) fn run(&self, deferred: Deferred) {
        let Deferred { events, latches, again } = deferred;
        let parting = std::mem::take(&mut self.lock().parting);
        drop(parting);
        if let Some(listener) = &self.listener {
            events.iter().for_each(listener);
        }
        drop(latches);
        if again {
            let service: Weak<dyn Service> = self.me.clone();
            self.pool.send(0, Message::Service(service));
        }
    }

    /// Records something in the trace.
    pub(crate) fn note(&self, kind: Kind, qid: u16, value: u32, extra: u32) {
        self.pool.note(kind, self.shared.id, qid, value, extra);
    }

    fn invalid_register(&self) {
        let deferred = self.lock().invalid_doorbell_register(self);
        self.run(deferred);
    }
}

impl Service for Inner {
    fn service(&self) {
        let deferred = self.lock().service(self);
        self.run(deferred);
    }
}

impl Reporter for Inner {
    fn report(&self, report: Report) {
        let deferred = self.lock().report(self, report);
        self.run(deferred);
    }
}
