//! Namespaces that a host makes: what they are made from, and what is asked of whoever has that.
//!
//! The controller understands the commands, checks them, and tells the host how they ended. What a
//! namespace keeps its bytes in, and which there are, is known to a [`NamespacePool`], which
//! outlives the controller. It carries out one [order](PoolOrder) at a time, on a thread of its
//! own, and has the namespaces that are attached come and go as any owner of the controller does
//! ([`Controller::add_namespace`](crate::Controller::add_namespace)).

use crate::notice::{ControlHandle, Notice};
use shadowbell_backend::{MetadataDisk, MetadataFormat};
use shadowbell_spec::admin::Sanitize;
use shadowbell_spec::status::Status;
use std::fmt;

/// A namespace that was created from a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolNamespace {
    /// Its number, which stays the same.
    pub nsid: u32,
    /// Its UUID, as for [`NamespaceConfig`](crate::NamespaceConfig).
    pub uuid: [u8; 16],
    /// Its size in logical blocks.
    pub blocks: u64,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size: u32,
    /// What metadata each block has, if it has any.
    pub metadata: Option<MetadataFormat>,
    /// Whether the controller has it.
    pub attached: bool,
}

impl PoolNamespace {
    /// Its size in bytes, with its metadata.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        bytes_of(self.blocks, self.block_size, self.metadata.as_ref()).unwrap_or(u64::MAX)
    }
}

/// How many bytes so many blocks take, with their metadata; `None` if 64 bits do not hold it.
pub(crate) fn bytes_of(
    blocks: u64,
    block_size: u32,
    metadata: Option<&MetadataFormat>,
) -> Option<u64> {
    match metadata {
        None => blocks.checked_mul(block_size.into()),
        Some(format) => MetadataDisk::bytes_for(blocks, block_size, format),
    }
}

/// How far the most recent sanitize operation is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SanitizePhase {
    /// There was none.
    #[default]
    Never,
    /// It is under way: so many 65536th parts are done.
    InProgress(u16),
    /// It was successful.
    Successful,
    /// It has failed. The namespaces stay out of reach until another one is successful, or the
    /// host leaves that state.
    Failed,
    /// The host has left that state: the namespaces can be reached.
    FailureLeft,
}

/// The most recent sanitize operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SanitizeStatus {
    /// How far it is.
    pub phase: SanitizePhase,
    /// What the host has asked for.
    pub command: Sanitize,
    /// Passes of an overwrite that are complete.
    pub passes: u8,
}

impl SanitizeStatus {
    /// How a command ends that the operation does not let have a namespace, if it does not.
    #[must_use]
    pub fn barrier(&self) -> Option<Status> {
        match self.phase {
            SanitizePhase::InProgress(_) => Some(Status::SANITIZE_IN_PROGRESS),
            SanitizePhase::Failed => Some(Status::SANITIZE_FAILED),
            SanitizePhase::Never | SanitizePhase::Successful | SanitizePhase::FailureLeft => None,
        }
    }
}

/// What a pool is at a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolState {
    /// How many bytes the namespaces may have together.
    pub capacity: u64,
    /// The namespaces, in the order of their NSIDs.
    pub namespaces: Vec<PoolNamespace>,
    /// The most recent sanitize operation.
    pub sanitize: SanitizeStatus,
}

impl PoolState {
    /// The namespace of this number.
    #[must_use]
    pub fn get(&self, nsid: u32) -> Option<&PoolNamespace> {
        self.namespaces.iter().find(|namespace| namespace.nsid == nsid)
    }

    /// How many bytes no namespace has.
    #[must_use]
    pub fn unallocated(&self) -> u64 {
        let taken = self.namespaces.iter().map(PoolNamespace::bytes);
        self.capacity.saturating_sub(taken.fold(0, u64::saturating_add))
    }
}

/// What a host wants done. The controller has checked it against the [state](PoolState).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolAct {
    /// A namespace is to be there, attached to nobody; the number of it is the outcome.
    Create {
        /// Its UUID, which the controller has chosen. If there is a namespace with this UUID the
        /// order was carried out already.
        uuid: [u8; 16],
        /// Its size in logical blocks.
        blocks: u64,
        /// Bytes of a logical block.
        block_size: u32,
        /// What metadata each has.
        metadata: Option<MetadataFormat>,
    },
    /// These namespaces are to be gone, with what they hold.
    Delete(Vec<u32>),
    /// The controller is to have this namespace.
    Attach(u32),
    /// It is to have it no more.
    Detach(u32),
    /// These namespaces are to have such blocks, and to hold nothing of what they held.
    /// The size in bytes stays, without what is no whole block.
    Format {
        /// The namespaces.
        nsids: Vec<u32>,
        /// Bytes of a logical block.
        block_size: u32,
        /// What metadata each has.
        metadata: Option<MetadataFormat>,
    },
    /// A sanitize operation is to begin, of all namespaces; the order is carried out when it has
    /// begun, and [`PoolPort::sanitized`] tells of its end. With Exit Failure Mode, a failed one is
    /// to be forgotten.
    Sanitize(Sanitize),
}

/// What a host wants done, and how often it was ordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolOrder {
    /// What is to be done.
    pub act: PoolAct,
    /// A process that has died may have done it, and has not told the host: that it is done already
    /// is no error.
    pub is_again: bool,
}

/// How an order has ended: dword 0 of the completion, or why it was not carried out.
pub type PoolOutcome = Result<u32, Status>;

/// What a host's namespaces are made from.
///
/// No method waits for storage: they are called under the lock of a control plane.
pub trait NamespacePool: Send + Sync + fmt::Debug {
    /// What there is.
    fn state(&self) -> PoolState;

    /// The controller of which the pool is, from here on.
    fn connect(&self, port: PoolPort);

    /// Has an order carried out by somebody else. What it changes, and what of that is to outlive a
    /// loss of power, is on stable storage when `done` is told.
    fn order(&self, order: PoolOrder, done: PoolDone);
}

/// The way from a pool to the controller.
#[derive(Clone, Debug)]
pub struct PoolPort(pub(crate) ControlHandle);

impl PoolPort {
    /// A sanitize operation has come to its end, as the [state](NamespacePool::state) says. The
    /// namespaces that can be reached are those of the controller again.
    pub fn sanitized(&self) {
        self.0.notify(Notice::Sanitized);
    }
}

/// Who waits for the end of an order. Dropped without a word it ends as an internal error.
#[derive(Debug)]
pub struct PoolDone {
    pub(crate) control: ControlHandle,
    pub(crate) generation: u64,
    pub(crate) cid: u16,
    pub(crate) is_told: bool,
}

impl PoolDone {
    /// The order has ended.
    pub fn end(mut self, outcome: PoolOutcome) {
        self.tell(outcome);
    }

    fn tell(&mut self, outcome: PoolOutcome) {
        if std::mem::replace(&mut self.is_told, true) {
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

impl Drop for PoolDone {
    fn drop(&mut self) {
        self.tell(Err(Status::INTERNAL));
    }
}
