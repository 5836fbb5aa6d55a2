//! The controller as whoever carries it to a host sees it: how one is made, who serves it, and what
//! it tells. Each of the files below has the calls of one subject.

mod dma;
mod handover;
mod namespaces;
mod registers;

use crate::config::{Config, ConfigError, MAX_NAMESPACES};
use crate::context::Context;
use crate::control::Callback;
use crate::event::Listener;
use crate::inquiry::Inquiry;
use crate::namespace::{Namespaces, Promises};
use crate::notice::{ControlHandle, ControlPlane};
use crate::plane::ControllerInner;
use crate::route::RelocateError;
use crate::saved::{SavedController, SavedPromises};
use crate::shared::{ControllerShared, DOORBELL_BYTES};
use crate::stats::Stats;
use crate::successor::RestoreError;
use crate::worker::{Pool, ThreadJob};
use shadowbell_spec::Status;
use shadowbell_spec::regs::DOORBELLS;
use shadowbell_state::Descriptors;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
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

    /// What the controller was made from, without its namespaces: see
    /// [`namespaces`](Self::namespaces).
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.context.config
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

    /// What Identify or Get Log Page shows the host, for somebody else, who needs no queue and may
    /// ask at any time. Nothing changes by it.
    ///
    /// # Errors
    /// The status that the command would complete with.
    pub fn inquire(&self, inquiry: Inquiry) -> Result<Vec<u8>, Status> {
        self.0.control().inquire(&self.0.context, inquiry)
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
