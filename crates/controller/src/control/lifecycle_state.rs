//! State of a controller's lifecycle, quiesce and exclusive commands, and deferred work.
//!
//! # Quiesce
//!
//! A controller is quiesced before it is transferred to another process.
//!
//! The controller first waits until no admin command is in flight, no other operation is pending,
//! and its disks have no [orphans](shadowbell_disk::Orphans) (cancelled writes that the storage may
//! still execute). Another process must not write to a disk before the disk's orphans have ended.
//! I/O continues meanwhile. Then its queues leave their I/O threads: no further command is fetched,
//! and requests in flight at the disks end. After that the controller is quiesced: the callbacks
//! are called, and it can be saved. A quiesce can be cancelled in every step.

use crate::event::Event;
use crate::notice::Latch;
use crate::uncorrectable::Uncorrectable;
use std::sync::Arc;
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// CSTS.RDY is 0.
    Disabled,
    /// CSTS.RDY is 1.
    Ready,
    /// CC.EN was cleared, and commands in flight are ending.
    Resetting,
    /// CSTS.RDY is 1, and a shutdown has begun: no command is fetched until the next reset.
    ShutDown,
}

/// Step of a shutdown (CC.SHN) in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shutdown {
    /// No shutdown is in progress.
    None,
    /// The shutdown starts after the reset in progress.
    AfterReset,
    /// Queues are leaving their I/O threads, and commands in flight are ending.
    Leaving,
    /// The caches of all disks are being flushed.
    Flushing,
    /// Caches are being flushed, and the host has requested another shutdown meanwhile.
    FlushingAgain,
}

/// Waiter for the end of a reset.
pub(super) enum Waiter {
    /// Callback of a reset request.
    Reset(Callback),
    /// Callback of a disconnect, called after memory maps and interrupts are dropped as well.
    Disconnect(Callback),
}

/// Lifecycle state of a controller.
pub(super) struct Lifecycle {
    pub(super) phase: Phase,
    /// Number of resets. Notices about operations that began before a reset are ignored.
    pub(super) generation: u64,
    /// Waiters that are called at the end of the reset in progress.
    pub(super) waiting: Vec<Waiter>,
    /// True if the end of the reset in progress restores the registers' power-on values.
    pub(super) full_reset: bool,
    pub(super) shutdown: Shutdown,
    /// Time at which the shutdown in progress exceeds RTD3E.
    pub(super) shutdown_limit: Option<Instant>,
    /// Time at which the reset in progress exceeds CAP.TO.
    pub(super) reset_limit: Option<Instant>,
    pub(super) power_cycles: u64,
    pub(super) unsafe_shutdowns: u64,
    pub(super) since: Instant,
    /// Time of the last reset.
    pub(super) reset_at: Instant,
}

impl Lifecycle {
    /// State at power on.
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::Disabled,
            generation: 0,
            waiting: Vec::new(),
            full_reset: false,
            shutdown: Shutdown::None,
            shutdown_limit: None,
            reset_limit: None,
            power_cycles: 1,
            unsafe_shutdowns: 0,
            since: Instant::now(),
            reset_at: Instant::now(),
        }
    }

    /// True if no reset or shutdown is in progress.
    pub(super) fn is_idle(&self) -> bool {
        self.phase != Phase::Resetting && self.shutdown == Shutdown::None && self.waiting.is_empty()
    }
}

/// Steps of a quiesce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// No quiesce is requested.
    Running,
    /// Quiesce requested: no admin command is started, and admin commands in flight end.
    Requested,
    /// Queues are leaving their I/O threads.
    Leaving,
    /// The queues have left their I/O threads.
    Quiesced,
    /// The quiesce was cancelled while queues were leaving. Queues that have left return.
    Returning,
}

/// Quiesce state and waiting callbacks.
pub(super) struct Quiesce {
    pub(super) step: Step,
    /// Callbacks, which are called when the controller is quiesced, and dropped if the quiesce is
    /// cancelled.
    pub(super) waiting: Vec<Callback>,
    /// Time of the next check for orphans of the disks, while the quiesce waits for them.
    pub(super) retry_at: Option<Instant>,
}

impl Quiesce {
    pub(super) fn new() -> Self {
        Self { step: Step::Running, waiting: Vec::new(), retry_at: None }
    }
}

/// Stage of a round of exclusive commands. In a round, each I/O thread gets one turn.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Stage {
    #[default]
    Nothing,
    /// I/O threads stop fetching, and commands in flight end.
    Pausing,
    /// One I/O thread executes its exclusive commands. The I/O threads in `left` follow.
    Executing,
    /// Changes are added to the checkpoint; after that, I/O threads write outcomes to the journal.
    Recording,
}

/// State of exclusive command execution.
#[derive(Debug, Default)]
pub(super) struct Exclusive {
    pub(super) is_requested: bool,
    pub(super) stage: Stage,
    /// I/O threads that may have queues of the controller.
    pub(super) workers: Vec<usize>,
    pub(super) left: Vec<usize>,
    /// Blocks marked as uncorrectable before the round.
    pub(super) marks: Arc<Uncorrectable>,
}

impl Exclusive {
    /// True if no exclusive command is waiting or running.
    pub(super) fn is_idle(&self) -> bool {
        !self.is_requested && self.stage == Stage::Nothing
    }

    /// Requests a round, because an I/O thread has an exclusive command.
    pub(super) fn request(&mut self) {
        self.is_requested = true;
    }
}

/// Callback of an external caller. It runs on any thread, after the lock is released.
pub(crate) type Callback = Box<dyn FnOnce() + Send>;

/// Work that runs after the control plane's lock is released.
#[derive(Default)]
#[must_use = "pass it to ControllerInner::run"]
pub(crate) struct Deferred {
    pub(crate) events: Vec<Event>,
    /// Latches to drop. Dropping the last clone sends a notice, and its handler may take the lock.
    pub(crate) latches: Vec<Latch>,
    pub(crate) callbacks: Vec<Callback>,
}

impl Deferred {
    pub(crate) fn event(&mut self, event: Event) {
        self.events.push(event);
    }
}
