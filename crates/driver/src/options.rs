//! Options of an attach.

use crate::error::AttachError;
use crate::queue::SpinPolicy;
use crate::recovery::Recovery;
use std::time::Duration;

/// Doorbell mode: the way in which the controller learns new submission queue tails and completion
/// queue heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Doorbells {
    /// Shadow doorbells if the controller supports them, otherwise mapped ones, otherwise plain
    /// ones.
    #[default]
    Auto,
    /// Shadow doorbells (Doorbell Buffer Config): a store in shared memory, and a register write
    /// only if the controller requests one by its EventIdx.
    Shadow,
    /// Plain doorbells: one register write for each update, handled by the device or its emulation.
    Mmio,
    /// Mapped doorbells: a store in memory. The store does not trap, so the controller has to poll
    /// the memory.
    Mapped,
}

/// Options of [`Controller::attach`](crate::Controller::attach).
///
/// Fields will be added in later versions: set the fields of interest, and take the other fields
/// from the default.
///
/// ```
/// use shadowbell_driver::AttachOptions;
///
/// let options = AttachOptions { queue_pairs: 4, queue_depth: 256, ..AttachOptions::default() };
/// assert!(options.interrupts);
/// ```
#[derive(Clone, Debug)]
pub struct AttachOptions {
    /// Number of I/O queue pairs to create; fewer are created if the controller grants fewer.
    pub queue_pairs: u16,
    /// Entries of each I/O submission queue, 2 to 65536, limited by CAP.MQES. The number of
    /// commands that can be outstanding is one less.
    pub queue_depth: u32,
    /// Doorbell mode. If the controller does not support it, [`Doorbells::Mmio`] is used and a line
    /// is logged.
    pub doorbells: Doorbells,
    /// Enables interrupts. Queues without an interrupt find completions only by polling.
    pub interrupts: bool,
    /// Time that a queue with an interrupt polls before it sleeps.
    pub spin: SpinPolicy,
    /// Transfer limit of one command in bytes. MDTS and 512 MiB limit it further.
    pub max_transfer_bytes: u64,
    /// Memory page size (CC.MPS), a power of two of at least 4096; `None` for the smallest size
    /// that the controller supports.
    pub page_size: Option<u32>,
    /// Timeouts of the controller's state changes and of commands.
    pub timeouts: Timeouts,
    /// Recovery of a controller that does not complete commands in time.
    pub recovery: Recovery,
}

impl Default for AttachOptions {
    /// Default options: one queue pair of 128 entries with an interrupt, shadow doorbells if
    /// supported, and up to 1 MiB per command.
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

/// Timeouts of state changes and commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// Timeout for CSTS.RDY to follow CC.EN; `None` for the controller's value (CAP.TO, CRTO).
    pub ready: Option<Duration>,
    /// Timeout of an admin command.
    pub admin: Duration,
    /// Timeout of an I/O command. When it expires, [recovery](crate::recovery) begins.
    pub io: Duration,
    /// Timeout of a shutdown (CSTS.SHST). If the controller specifies a longer time (RTD3E), that
    /// time applies.
    pub shutdown: Duration,
}

impl Default for Timeouts {
    /// Default timeouts: the controller's value (CAP.TO or CRTO) for CSTS.RDY, 10 s for an admin
    /// command, 30 s for an I/O command, 5 s for a shutdown.
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
