//! What a worker tells the control plane.
//!
//! A [`Notice`] is plain data: it can be sent, kept, and written down. Nothing that a worker tells
//! is a closure.

use shadowbell_spec::status::Status;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// What a worker tells the control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Notice {
    /// A doorbell with a value that can not be.
    InvalidDoorbell {
        /// Queue identifier.
        qid: u16,
    },
    /// A command that ended in an error that goes to the error log.
    CommandError {
        /// Submission queue identifier.
        sqid: u16,
        /// Command identifier.
        cid: u16,
        /// How it ended.
        status: Status,
        /// Its namespace.
        nsid: u32,
        /// Its first logical block.
        lba: u64,
    },
    /// Memory of the host was taken away from under us: the controller is in a fatal state.
    MemoryLost,
    /// The controller's turns take too long for those that it shares a worker with.
    SlowTurns {
        /// How long the last one took.
        took: Duration,
    },
    /// What worker `from` had of the queues has arrived at another.
    Relocated {
        /// Its number in the pool.
        from: usize,
    },
    /// All queues of the controller have left their workers for a rest, or stay with them.
    Left,
    /// The queues of a controller could not be taken over by another worker, and are gone.
    Stranded,
    /// Something befell the whole controller while its queues were served.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    Condition(Condition),
    /// A command has to be alone, and waits for that.
    WantsToBeAlone,
    /// The admin queue has to be looked at.
    AdminDoorbell,
    /// All workers have another namespace of this NSID, and nothing uses the disk of the one
    /// before.
    NamespaceChanged {
        /// The namespace.
        nsid: u32,
        /// Whether they could open its disk.
        status: Status,
    },
    /// An order that the pool of namespaces was given has ended.
    PoolEnded {
        /// Resets that there had been when it was given.
        generation: u64,
        /// The admin command.
        cid: u16,
        /// How it ends.
        status: Status,
        /// Dword 0 of its completion.
        dw0: u32,
    },
    /// A sanitize operation has ended.
    Sanitized,
    /// Nothing uses memory any more that was unmapped; `ticket` says who waits for that.
    MemoryReleased {
        /// The number that the control plane gave the unmap.
        ticket: u64,
    },
    /// Something has changed in the controller's subsystem.
    Shared,
    /// Nothing is under way any more that was when the state of an ANA group was changed.
    AnaChanged {
        /// Who waits for that.
        ticket: u64,
    },
    /// A reservation command is over.
    ReservationEnded {
        /// What the worker has called it.
        ticket: u64,
        /// How.
        status: Status,
    },
    /// All workers that take part in an operation of the control plane are done with it.
    Ended {
        /// Resets that there had been when it began: what began before a reset concerns nobody.
        generation: u64,
        /// Which operation.
        operation: Operation,
        /// How it went, as a worker has said; success if none has said anything.
        status: Status,
    },
}

/// An operation of the control plane that workers take part in. `cid` is the admin command.
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
    /// Abort. Its status is Command Abort Requested if the command was aborted.
    Abort { cid: u16 },
    /// Get LBA Status.
    LbaStatus { cid: u16 },
    /// A feature that the subsystem has.
    Feature { cid: u16 },
    /// The flush before the volatile write cache is off.
    Flush { cid: u16 },
    /// What is under way ends, so that a command can be alone.
    Pause,
    /// A worker carries out what has to be alone.
    Alone,
    /// What that has changed is recorded.
    Recorded,
    /// Nothing of it would be done again by another process.
    Settled,
    /// A piece of a self-test.
    SelfTest { run: u32, nsid: u32 },
    /// The flush of a shutdown.
    Shutdown,
    /// A Controller Level Reset.
    Reset,
}

/// What may befall a controller as a whole. Only a controller with injected faults meets these.
#[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "made by fault injection only"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// Controller Fatal Status.
    Fatal,
    /// An NVM Subsystem Reset.
    SubsystemReset,
    /// The device is not there any more.
    Removed,
}

/// Takes notices, on any thread, without waiting for anything.
pub(crate) trait ControlPlane: Send + Sync {
    fn notify(&self, notice: Notice);
}

/// The control plane of a controller, for those that may outlive it.
#[derive(Clone)]
pub(crate) struct ControlHandle(Weak<dyn ControlPlane>);

impl ControlHandle {
    pub(crate) fn new(plane: Weak<dyn ControlPlane>) -> Self {
        Self(plane)
    }

    /// Gives notice, if the controller is there yet: whether it is.
    pub(crate) fn notify(&self, notice: Notice) -> bool {
        self.0.upgrade().map(|plane: Arc<dyn ControlPlane>| plane.notify(notice)).is_some()
    }

    /// Whether the controller is there yet.
    pub(crate) fn is_alive(&self) -> bool {
        self.0.strong_count() != 0
    }
}

impl fmt::Debug for ControlHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControlHandle")
    }
}
