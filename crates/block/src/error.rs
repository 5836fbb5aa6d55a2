//! What can go wrong with a block device, in sentences.

use rustix::io::Errno;
use shadowbell_driver::{CommandError, DmaError, IoErrorKind, RequestError};
use shadowbell_spec::Status;
use std::io;
use std::sync::Arc;
use thiserror::Error;

/// Why a block device could not be opened.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The controller has no such namespace.
    #[error("there is no namespace {nsid} on {device}")]
    NoNamespace {
        /// The namespace.
        nsid: u32,
        /// What a person calls the controller.
        device: String,
    },
    /// The namespace is one whose blocks the driver can not move.
    #[error("namespace {nsid} {what}, which the driver can not handle; format it without")]
    Unusable {
        /// The namespace.
        nsid: u32,
        /// What it has.
        what: &'static str,
    },
    /// There is no queue pair to use.
    #[error("{device} has no queue pair left")]
    NoQueue {
        /// What a person calls the controller.
        device: String,
    },
    /// There is no memory to share with the device.
    #[error(transparent)]
    Dma(#[from] DmaError),
    /// There is no thread or descriptor to be had for a queue.
    #[error("a queue could not be started: {0}")]
    Start(io::Error),
}

/// Why a request failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum BlockError {
    /// The request reaches past the end of the disk.
    #[error("{len} bytes at byte {offset} reach past the disk's {size} bytes")]
    OutOfRange {
        /// The first byte.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// How many bytes the disk has.
        size: u64,
    },
    /// The disk takes no writes.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The controller does not have what it takes, and there is nothing to put in its place.
    #[error("the controller has no {command} command")]
    Unsupported {
        /// The command's name in the specification.
        command: &'static str,
    },
    /// The command failed.
    #[error(transparent)]
    Command(#[from] IoErrorKind),
    /// A command of the control plane failed.
    #[error("{0}")]
    Admin(Arc<CommandError>),
    /// The device did not give a single buffer back, so there is none for another command.
    #[error("the device gives no buffer back; attach again")]
    BuffersLost,
    /// A command completed without its buffer, or with a shorter one: a defect of this program.
    #[error("a buffer does not fit its command, which is a defect of the block layer")]
    Buffer,
}

impl From<RequestError> for BlockError {
    fn from(error: RequestError) -> Self {
        Self::Command(IoErrorKind::Request(error))
    }
}

impl From<CommandError> for BlockError {
    fn from(error: CommandError) -> Self {
        Self::Admin(Arc::new(error))
    }
}

impl BlockError {
    /// The status that the controller gave, if it gave one.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Command(IoErrorKind::Status { status, .. }) => Some(*status),
            Self::Admin(error) => error.status(),
            _ => None,
        }
    }

    /// The system's number for it, as the protocols want it that a disk is exported with: `EPERM`
    /// for a disk that takes no writes, `EINVAL` for a range that is not there, `ENOTSUP` for what
    /// can not be done, `ENOSPC` for a controller without room, and `EIO` for everything else.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            Self::ReadOnly => Errno::PERM,
            Self::OutOfRange { .. } => Errno::INVAL,
            Self::Unsupported { .. } => Errno::NOTSUP,
            _ => match self.status().map(Status::code) {
                Some(Status::NAMESPACE_WRITE_PROTECTED | Status::ATTEMPT_TO_WRITE_RO_RANGE) => {
                    Errno::PERM
                }
                Some(Status::CAPACITY_EXCEEDED) => Errno::NOSPC,
                _ => Errno::IO,
            },
        }
    }
}
