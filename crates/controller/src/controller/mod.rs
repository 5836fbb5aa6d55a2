//! Public interface of a controller: creation, placement, reset and statistics. Each submodule has
//! the methods of one subject.

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
use crate::worker::Pool;
use shadowbell_spec::Status;
use shadowbell_spec::regs::DOORBELLS;
use shadowbell_state::Descriptors;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

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

/// Properties of the carrier, which connects a controller to its host.
#[derive(Default)]
pub struct Carrier {
    /// True if the host maps the doorbell page and writes it directly. Writes then do not trap, and
    /// I/O threads poll the doorbells at least every millisecond.
    pub mapped_doorbells: bool,
    /// Callback for events. Called on the thread that causes the event.
    pub listener: Option<Listener>,
}

impl fmt::Debug for Carrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Carrier").field("mapped_doorbells", &self.mapped_doorbells).finish()
    }
}

/// NVMe controller without a transport. The carrier, which is a vfio-user server or a driver in the
/// same process, reads and writes its registers and maps host memory.
///
/// A clone is another handle of the same controller. All methods may be called from any thread, and
/// none waits for I/O.
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

    /// Creates a controller that continues a [quiesced](Self::freeze) one of this process or of a
    /// process that is about to end. `config` and `carrier` must be the same from the host's view.
    ///
    /// The new controller uses the doorbell page of the old one, and is disabled until
    /// [`restore`](Self::restore). Before that, host memory has to be mapped and interrupts
    /// connected as for the old one.
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

    /// Moves the controller to a dedicated I/O thread, for the rest of its lifetime. Commands in
    /// flight end first; others wait in their queues, and the host does not notice the move. It is
    /// useful for a guest that is less trusted than others, or that has paid for it. A guest that
    /// delays other guests is moved automatically ([`Event::Isolated`](crate::Event::Isolated)).
    ///
    /// # Errors
    /// [`RelocateError`].
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
    /// their power-on values; DMA maps and interrupt vectors stay. `done` runs, on any thread, when
    /// no command is in flight. It is dropped instead if the last handle of the controller is
    /// dropped earlier.
    pub fn reset(&self, done: impl FnOnce() + Send + 'static) {
        self.0.with(|control, cx| control.reset(cx, Box::new(done)));
    }

    /// Handles a disconnected host: resets the controller, then drops DMA maps and interrupts.
    /// `done` runs, on any thread, when the host's memory is no longer accessed.
    pub fn disconnect(&self, done: impl FnOnce() + Send + 'static) {
        // The callback keeps the controller alive until then, even if all handles are dropped.
        let inner = Arc::clone(&self.0);
        let done: Callback = Box::new(move || {
            done();
            drop(inner);
        });
        self.0.with(|control, cx| control.disconnect(cx, done));
    }

    /// Executes an out-of-band Identify or Get Log Page. No queue is needed, and the controller's
    /// state is not changed, so the method can be called at any time.
    ///
    /// # Errors
    /// The completion status of the command.
    pub fn inquire(&self, inquiry: Inquiry) -> Result<Vec<u8>, Status> {
        self.0.control().inquire(&self.0.context, inquiry)
    }

    /// Returns and resets the maximum number of pending notices. Used by the fuzz targets of this
    /// workspace, which check that it is bounded.
    #[doc(hidden)]
    #[must_use]
    pub fn most_notices(&self) -> usize {
        self.0.most_notices()
    }

    /// Statistics of the controller. The counters are read directly, without a message to an I/O
    /// thread, so a blocked I/O thread does not block the call. An event is counted before the host
    /// can observe it. Values of a busy controller are not from one instant.
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
