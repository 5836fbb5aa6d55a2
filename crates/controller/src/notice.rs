//! Notices from I/O threads to the control plane.
//!
//! A [`Notice`] is plain data without closures, so it can be sent, queued and compared.

use shadowbell_spec::status::Status;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Notice from an I/O thread to the control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// Invalid doorbell value.
    InvalidDoorbell {
        /// Queue identifier.
        qid: u16,
    },
    /// Command that ended in an error for the error log.
    CommandError {
        /// Submission queue identifier.
        sqid: u16,
        /// Command identifier.
        cid: u16,
        /// Completion status.
        status: Status,
        /// NSID.
        nsid: u32,
        /// First logical block.
        lba: u64,
    },
    /// Mapped host memory became inaccessible: the controller enters a fatal state.
    MemoryLost,
    /// The controller's passes take too long for other controllers on the same I/O thread.
    SlowTurns {
        /// Duration of the last pass.
        took: Duration,
    },
    /// The queues of I/O thread `from` have arrived at another I/O thread.
    Relocated {
        /// Number of the I/O thread in the pool.
        from: usize,
    },
    /// All queues of the controller have left their I/O threads for a quiesce, or stay there.
    Left,
    /// Queues of the controller are lost, because another I/O thread could not take them over.
    Stranded,
    /// Injected condition of the whole controller.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    Condition(Condition),
    /// A command waits for exclusive execution.
    WantsExclusive,
    /// The admin queue has to be polled.
    AdminDoorbell,
    /// All I/O threads serve the changed namespace, and the old namespace's disk is unused.
    NamespaceChanged {
        /// NSID.
        nsid: u32,
        /// Error if an I/O thread could not open the disk.
        status: Status,
    },
    /// The namespace pool has finished an order.
    PoolEnded {
        /// Number of resets before the order.
        generation: u64,
        /// Identifier of the admin command.
        cid: u16,
        /// Completion status.
        status: Status,
        /// Dword 0 of the completion.
        dw0: u32,
    },
    /// A sanitize operation has finished.
    Sanitized,
    /// Unmapped host memory is no longer used.
    MemoryReleased {
        /// Number that the control plane gave to the unmap.
        ticket: u64,
    },
    /// The state of the controller's subsystem has changed.
    Shared,
    /// All commands have ended that were in flight when an ANA group changed its state.
    AnaChanged {
        /// Number that the control plane gave to the change.
        ticket: u64,
    },
    /// A reservation command has finished.
    ReservationEnded {
        /// Number that the I/O thread gave to the command.
        ticket: u64,
        /// Completion status.
        status: Status,
    },
    /// All I/O threads have finished their part of a control plane operation.
    Ended {
        /// Number of resets before the operation. Notices from before a reset are ignored.
        generation: u64,
        /// Kind of operation.
        operation: Operation,
        /// Status set by an I/O thread, otherwise success.
        status: Status,
    },
}

/// Operation of the control plane with participation of I/O threads. `cid` identifies the admin
/// command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Create I/O Completion Queue.
    CreateCq { qid: u16, cid: u16 },
    /// Create I/O Submission Queue.
    CreateSq { qid: u16, cid: u16 },
    /// Delete I/O Completion Queue.
    DeleteCq { qid: u16, cid: u16 },
    /// Delete I/O Submission Queue.
    DeleteSq { qid: u16, cid: u16 },
    /// Doorbell Buffer Config.
    ShadowDoorbells { cid: u16 },
    /// Abort. Status Command Abort Requested means that the command was aborted.
    Abort { cid: u16 },
    /// Get LBA Status.
    LbaStatus { cid: u16 },
    /// Set Features of a feature that belongs to the subsystem.
    Feature { cid: u16 },
    /// Flush before the volatile write cache is disabled.
    Flush { cid: u16 },
    /// End of the commands in flight before exclusive execution of a command.
    Pause,
    /// Exclusive execution of a command by an I/O thread.
    Exclusive,
    /// Checkpoint of changes made by exclusive commands.
    Recorded,
    /// Journal entries for the outcome of exclusive commands: a recovery would not repeat any.
    Settled,
    /// Segment of a device self-test.
    SelfTest { run: u32, nsid: u32 },
    /// Flush of a shutdown.
    Shutdown,
    /// Controller Level Reset.
    Reset,
}

/// Condition of a whole controller. Caused only by fault injection.
#[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "made by fault injection only"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// Controller Fatal Status.
    Fatal,
    /// NVM Subsystem Reset.
    SubsystemReset,
    /// Surprise removal of the device.
    Removed,
}

/// Receiver of notices, callable from any thread without blocking.
pub(crate) trait ControlPlane: Send + Sync {
    fn notify(&self, notice: Notice);
}

/// Weak handle of a controller's control plane.
#[derive(Clone)]
pub(crate) struct ControlHandle(Weak<dyn ControlPlane>);

impl ControlHandle {
    pub(crate) fn new(plane: Weak<dyn ControlPlane>) -> Self {
        Self(plane)
    }

    /// Sends a notice. Returns false if the controller no longer exists.
    pub(crate) fn notify(&self, notice: Notice) -> bool {
        self.0.upgrade().map(|plane: Arc<dyn ControlPlane>| plane.notify(notice)).is_some()
    }

    /// True if the controller still exists.
    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() != 0
    }
}

impl fmt::Debug for ControlHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControlHandle")
    }
}
