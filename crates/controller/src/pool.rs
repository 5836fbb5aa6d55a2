//! Namespace pool: interface to the storage from which a host creates namespaces.
//!
//! The controller decodes, checks and completes Namespace Management, Namespace Attachment, Format
//! NVM and Sanitize. A [`NamespacePool`] manages the namespaces and their storage, and outlives the
//! controller. The pool executes one [order](PoolOrder) at a time on its own thread. To add or
//! remove attached namespaces, the pool uses the public methods of the controller
//! ([`Controller::add_namespace`](crate::Controller::add_namespace)).

use crate::notice::{ControlHandle, Notice};
use shadowbell_disk::MetadataFormat;
use shadowbell_spec::admin::Sanitize;
use shadowbell_spec::status::Status;
use std::fmt;

/// Namespace that was created from a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolNamespace {
    /// NSID, which never changes.
    pub nsid: u32,
    /// UUID, as in [`NamespaceConfig`](crate::NamespaceConfig).
    pub uuid: [u8; 16],
    /// Size in logical blocks.
    pub blocks: u64,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size: u32,
    /// Metadata format, if blocks have metadata.
    pub metadata: Option<MetadataFormat>,
    /// True if the namespace is attached to the controller.
    pub attached: bool,
}

impl PoolNamespace {
    /// Size in bytes, including metadata.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        bytes_of(self.blocks, self.block_size, self.metadata.as_ref()).unwrap_or(u64::MAX)
    }
}

/// Size of `blocks` blocks in bytes, including metadata; `None` if it exceeds 64 bits.
pub(crate) fn bytes_of(
    blocks: u64,
    block_size: u32,
    metadata: Option<&MetadataFormat>,
) -> Option<u64> {
    match metadata {
        None => blocks.checked_mul(block_size.into()),
        Some(format) => format.bytes_for(blocks, block_size),
    }
}

/// Phase of the most recent sanitize operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SanitizePhase {
    /// No sanitize operation has been started.
    #[default]
    Never,
    /// The operation is in progress. The value is the progress in 65536ths.
    InProgress(u16),
    /// The operation was successful.
    Successful,
    /// The operation failed. The namespaces are inaccessible until another operation succeeds or
    /// the host exits the failure mode.
    Failed,
    /// The host exited the failure mode, so the namespaces are accessible.
    FailureModeExited,
}

/// Status of the most recent sanitize operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SanitizeStatus {
    /// Phase of the operation.
    pub phase: SanitizePhase,
    /// Parameters of the Sanitize command.
    pub command: Sanitize,
    /// Completed overwrite passes.
    pub passes: u8,
}

impl SanitizeStatus {
    /// Status with which commands that access a namespace fail; `None` if the sanitize operation
    /// does not block them.
    #[must_use]
    pub fn barrier(&self) -> Option<Status> {
        match self.phase {
            SanitizePhase::InProgress(_) => Some(Status::SANITIZE_IN_PROGRESS),
            SanitizePhase::Failed => Some(Status::SANITIZE_FAILED),
            SanitizePhase::Never | SanitizePhase::Successful | SanitizePhase::FailureModeExited => {
                None
            }
        }
    }
}

/// Snapshot of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolState {
    /// Maximum size of all namespaces together, in bytes.
    pub capacity: u64,
    /// Namespaces in ascending order of NSID.
    pub namespaces: Vec<PoolNamespace>,
    /// Status of the most recent sanitize operation.
    pub sanitize: SanitizeStatus,
}

impl PoolState {
    /// Namespace with this NSID.
    #[must_use]
    pub fn get(&self, nsid: u32) -> Option<&PoolNamespace> {
        self.namespaces.iter().find(|namespace| namespace.nsid == nsid)
    }

    /// Unallocated capacity in bytes.
    #[must_use]
    pub fn unallocated(&self) -> u64 {
        let taken = self.namespaces.iter().map(PoolNamespace::bytes);
        self.capacity.saturating_sub(taken.fold(0, u64::saturating_add))
    }
}

/// Action that a host requests from a pool. The controller has already checked the action against
/// the [state](PoolState).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolAct {
    /// Creates a detached namespace. The outcome is the NSID of the namespace.
    Create {
        /// UUID, chosen by the controller. If a namespace with this UUID exists already, the pool
        /// has executed the order before.
        uuid: [u8; 16],
        /// Size in logical blocks.
        blocks: u64,
        /// Bytes of a logical block.
        block_size: u32,
        /// Metadata format, if blocks have metadata.
        metadata: Option<MetadataFormat>,
    },
    /// Deletes namespaces and their contents.
    Delete(Vec<u32>),
    /// Attaches a namespace to the controller.
    Attach(u32),
    /// Detaches a namespace from the controller.
    Detach(u32),
    /// Formats namespaces with the given block size and metadata, and erases their contents. The
    /// size in bytes stays, rounded down to whole blocks.
    Format {
        /// NSIDs of the namespaces.
        nsids: Vec<u32>,
        /// Bytes of a logical block.
        block_size: u32,
        /// Metadata format, if blocks have metadata.
        metadata: Option<MetadataFormat>,
    },
    /// Starts a sanitize operation on all namespaces. The order ends when the operation has
    /// started, and [`PoolPort::sanitized`] reports the end of the operation. If the command is
    /// Exit Failure Mode, the order clears a failed operation instead.
    Sanitize(Sanitize),
}

/// Order for a pool: an action, and whether it is repeated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolOrder {
    /// Action to execute.
    pub act: PoolAct,
    /// True if the order is repeated after a crash. The dead process may have executed the action
    /// without completing the command, so an already executed action is not an error.
    pub is_repeat: bool,
}

/// Outcome of an order: dword 0 of the completion, or the error status.
pub type PoolOutcome = Result<u32, Status>;

/// Storage pool from which a host creates namespaces.
///
/// The methods are called under the lock of a control plane, so none may wait for storage.
pub trait NamespacePool: Send + Sync + fmt::Debug {
    /// Current state of the pool.
    fn state(&self) -> PoolState;

    /// Connects the pool to its controller.
    fn connect(&self, port: PoolPort);

    /// Starts an order and returns immediately. All changes that must survive a power loss have to
    /// be on stable storage before `done` is called.
    fn order(&self, order: PoolOrder, done: PoolCallback);
}

/// Handle with which a pool notifies its controller.
#[derive(Clone, Debug)]
pub struct PoolPort(pub(crate) ControlHandle);

impl PoolPort {
    /// Reports the end of a sanitize operation. The pool's [state](NamespacePool::state) must have
    /// the result already, and the pool must have added the accessible namespaces to the controller
    /// again.
    pub fn sanitized(&self) {
        self.0.notify(Notice::Sanitized);
    }
}

/// Completion callback of an order. If it is dropped without a call of [`end`](Self::end), the
/// order ends with Internal Error.
#[derive(Debug)]
pub struct PoolCallback {
    pub(crate) control: ControlHandle,
    pub(crate) generation: u64,
    pub(crate) cid: u16,
    pub(crate) is_notified: bool,
}

impl PoolCallback {
    /// Completes the order.
    pub fn end(mut self, outcome: PoolOutcome) {
        self.finish(outcome);
    }

    fn finish(&mut self, outcome: PoolOutcome) {
        if std::mem::replace(&mut self.is_notified, true) {
            return;
        }
        let (status, dw0) = match outcome {
            Ok(dw0) => (Status::SUCCESS, dw0),
            Err(status) => (status, 0),
        };
        let &mut Self { generation, cid, .. } = self;
        self.control.notify(Notice::PoolEnded { generation, cid, status, dw0 });
    }
}

impl Drop for PoolCallback {
    fn drop(&mut self) {
        self.finish(Err(Status::INTERNAL));
    }
}
