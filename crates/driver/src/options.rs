//! What a program may choose when it attaches.

use crate::error::AttachError;
use crate::queue::SpinPolicy;
use crate::recovery::Recovery;
use std::time::Duration;

/// How the controller learns of new submission queue tails and completion queue heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Doorbells {
    /// Shadow doorbells if the controller has them, else mapped ones, else plain ones.
    #[default]
    Auto,
    /// Shadow doorbells (Doorbell Buffer Config): a store in shared memory, and a register write
    /// only when the controller asks for it.
    Shadow,
    /// Plain doorbells: a register write each, which the device, or whoever emulates it, handles.
    Mmio,
    /// Doorbells that are memory: a store, which nobody traps, so the controller has to poll.
    Mapped,
}

/// Options of [`Controller::attach`](crate::Controller::attach).
///
/// More will come: a program sets those that it cares about, and takes the rest from the default.
///
/// ```
/// use shadowbell_driver::AttachOptions;
///
/// let options = AttachOptions { queue_pairs: 4, queue_depth: 256, ..AttachOptions::default() };
/// assert!(options.interrupts);
/// ```
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// How many I/O queue pairs to create; fewer if the controller grants fewer.
    pub queue_pairs: u16,
    /// Entries of each I/O submission queue, 2 to 65536: one less is the number of commands that
    /// may be outstanding. Fewer if the controller takes fewer (CAP.MQES).
    pub queue_depth: u32,
    /// How the doorbells are rung. What the controller does not have is replaced by
    /// [`Doorbells::Mmio`], with a line in the log.
    pub doorbells: Doorbells,
    /// Have the controller interrupt. Without, and for queues for which the device has no vector,
    /// completions are found by polling alone.
    pub interrupts: bool,
    /// How long a queue polls before it sleeps, where it has an interrupt.
    pub spin: SpinPolicy,
    /// The most bytes that one command moves, where the controller takes more (MDTS): 512 MiB at
    /// most, if more are said.
    pub max_transfer_bytes: u64,
    /// The memory page size to set (CC.MPS), a power of two of at least 4096; `None` for the
    /// smallest that the controller supports.
    pub page_size: Option<u32>,
    /// How long to wait for what.
    pub timeouts: Timeouts,
    /// What to do about a controller that does not do what it should.
    pub recovery: Recovery,
}

impl Default for AttachOptions {
    /// One queue pair of 128 entries with an interrupt, shadow doorbells if there are any, and up
    /// to 1 MiB a command.
    fn default() -> Self {
        Self {
            queue_pairs: 1,
            queue_depth: 128,
            doorbells: Doorbells::Auto,
            interrupts: true,
            spin: SpinPolicy::default(),
            max_transfer_bytes: 1 << 20,
            page_size: None,
            timeouts: Timeouts::default(),
            recovery: Recovery::default(),
        }
    }
}

/// How long to wait for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For CSTS.RDY to follow CC.EN; `None` for what the controller says (CAP.TO, CRTO).
    pub ready: Option<Duration>,
    /// For a command of the control plane.
    pub admin: Duration,
    /// For an I/O command: after this, [recovery](crate::recovery) begins.
    pub io: Duration,
    /// For a shutdown (CSTS.SHST), at least; longer if the controller says so (RTD3E).
    pub shutdown: Duration,
}

impl Default for Timeouts {
    /// What the controller says to get ready, 10 s for an administrative command, 30 s for an I/O
    /// command, 5 s to shut down.
    fn default() -> Self {
        Self {
            ready: None,
            admin: Duration::from_secs(10),
            io: Duration::from_secs(30),
            shutdown: Duration::from_secs(5),
        }
    }
}

impl AttachOptions {
    pub(crate) fn check(&self) -> Result<(), AttachError> {
        let bad = |option, value, why| Err(AttachError::Option { option, value, why });
        if self.queue_pairs == 0 || self.queue_pairs == u16::MAX {
            return bad("queue_pairs", self.queue_pairs.into(), "it has to be 1 to 65534");
        }
        if shadowbell_doorbell::RingSize::new(self.queue_depth).is_none() {
            return bad("queue_depth", self.queue_depth.into(), "it has to be 2 to 65536");
        }
        if self.max_transfer_bytes < 4096 || self.max_transfer_bytes > u64::from(u32::MAX) {
            let why = "it has to be at least 4096 and below 4 GiB";
            return bad("max_transfer_bytes", self.max_transfer_bytes, why);
        }
        match self.page_size {
            Some(size) if !size.is_power_of_two() || !(4096..=1 << 27).contains(&size) => {
                bad("page_size", size.into(), "it has to be a power of two from 4096 to 128 MiB")
            }
            _ => Ok(()),
        }
    }
}
