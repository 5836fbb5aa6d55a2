//! io_uring instances that the kernel restricts to the operations in use ([`Allowed`]), and a
//! reserve of instances ([`Reserve`]) that a process creates before its seccomp filter forbids it
//! to create more.
#![deny(unsafe_code)]

use io_uring::register::Restriction;
use io_uring::{Builder, IoUring, cqueue, squeue};
use parking_lot::Mutex;
use std::io;

#[cfg(feature = "attempts")]
#[allow(unsafe_code)]
mod sys;

#[cfg(feature = "attempts")]
#[doc(hidden)]
pub use sys::{Attempted, attempts};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

/// Restrictions of an io_uring instance. The kernel refuses everything that is not listed, with
/// `EACCES`, as long as the instance exists.
#[derive(Clone, Copy, Debug)]
pub struct Allowed {
    /// Opcodes of requests.
    pub opcodes: &'static [u8],
    /// Flags of requests (`IOSQE_*`).
    pub flags: squeue::Flags,
    /// Operations of `io_uring_register`.
    pub registers: &'static [u8],
}

/// Operations of `io_uring_register`, for [`Allowed::registers`] and for seccomp filters.
pub mod register {
    /// Unregisters the table of registered files.
    pub const UNREGISTER_FILES: u8 = 3;
    /// Registers an eventfd for completions.
    pub const EVENTFD: u8 = 4;
    /// Unregisters the eventfd.
    pub const UNREGISTER_EVENTFD: u8 = 5;
    /// Changes entries of the table of registered files.
    pub const FILES_UPDATE: u8 = 6;
    /// Restricts the instance. The kernel refuses a second restriction.
    pub(crate) const RESTRICTIONS: u8 = 11;
}

impl Allowed {
    /// Restrictions that allow nothing.
    pub const NOTHING: Self = Self { opcodes: &[], flags: squeue::Flags::empty(), registers: &[] };

    /// Creates an instance with these restrictions, which cannot be removed. `prepare` registers
    /// files before the restrictions apply. The instance may be used by any thread, by one at a
    /// time.
    ///
    /// # Errors
    /// The system's error: `EINVAL` if the kernel lacks restrictions (before Linux 5.10) or an
    /// option of the builder.
    pub fn build<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
        &self,
        builder: &Builder<S, C>,
        entries: u32,
        prepare: impl FnOnce(&IoUring<S, C>) -> io::Result<()>,
    ) -> io::Result<IoUring<S, C>> {
        let ring = builder.clone().setup_r_disabled().build(entries)?;
        prepare(&ring)?;
        let opcodes = self.opcodes.iter().map(|code| Restriction::sqe_op(*code));
        // With an empty list of operations, a kernel may leave `io_uring_register` unrestricted.
        let registers = [register::RESTRICTIONS].into_iter().chain(self.registers.iter().copied());
        let registers = registers.map(Restriction::register_op);
        let flags = Restriction::sqe_flags_allowed(self.flags.bits());
        let mut all: Vec<_> = opcodes.chain(registers).chain([flags]).collect();
        ring.submitter().register_restrictions(&mut all)?;
        ring.submitter().register_enable_rings()?;
        Ok(ring)
    }
}

/// Reserve of io_uring instances of one kind. Before it is [sealed](Self::seal), it creates
/// instances on demand. Afterwards it has a fixed number, which users take and put back.
pub struct Reserve<S: Shape = squeue::Entry, C: cqueue::EntryMarker = cqueue::Entry> {
    /// Purpose of the instances.
    name: &'static str,
    build: fn() -> io::Result<IoUring<S, C>>,
    sealed: Mutex<Option<Sealed<S, C>>>,
}

/// Type of an instance's submission queue entries.
pub trait Shape: squeue::EntryMarker + From<squeue::Entry> + 'static {}

impl<S: squeue::EntryMarker + From<squeue::Entry> + 'static> Shape for S {}

struct Sealed<S: Shape, C: cqueue::EntryMarker> {
    spare: Vec<IoUring<S, C>>,
    /// Number of instances that were created.
    made: usize,
}

impl<S: Shape, C: cqueue::EntryMarker + 'static> Reserve<S, C> {
    /// Creates a reserve for the purpose `name`. `build` creates an instance.
    #[must_use]
    pub const fn new(name: &'static str, build: fn() -> io::Result<IoUring<S, C>>) -> Self {
        Self { name, build, sealed: Mutex::new(None) }
    }

    /// Creates `count` instances, and no instance later. Returns the number of created instances:
    /// fewer than `count` if the system has no descriptors or memory for all, and 0 if it permits
    /// none.
    pub fn seal(&'static self, count: usize) -> usize {
        #[cfg(feature = "attempts")]
        sys::register(self.name, || self.take(), |ring| self.put_back(ring));
        let spare: Vec<_> = (0..count).map_while(|_| (self.build)().ok()).collect();
        let made = spare.len();
        *self.sealed.lock() = Some(Sealed { spare, made });
        made
    }

    /// True if no more instances are created.
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.sealed.lock().is_some()
    }

    /// Takes an instance.
    ///
    /// # Errors
    /// All instances of a sealed reserve are in use (`ResourceBusy`), or the system's error.
    pub fn take(&self) -> io::Result<IoUring<S, C>> {
        let mut sealed = self.sealed.lock();
        let Some(Sealed { spare, made }) = &mut *sealed else {
            drop(sealed);
            return (self.build)();
        };
        spare.pop().ok_or_else(|| {
            let why = format!(
                "all {made} io_uring instances for {} that were created before the sandbox was \
                 entered are in use",
                self.name
            );
            io::Error::new(io::ErrorKind::ResourceBusy, why)
        })
    }

    /// Puts an instance back that has no request in flight, or destroys it if the reserve is not
    /// sealed.
    pub fn put_back(&self, ring: IoUring<S, C>) {
        if let Some(sealed) = &mut *self.sealed.lock() {
            sealed.spare.push(ring);
        }
    }
}

impl<S: Shape, C: cqueue::EntryMarker> std::fmt::Debug for Reserve<S, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reserve").field("name", &self.name).finish_non_exhaustive()
    }
}
