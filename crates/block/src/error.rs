//! Error types of block devices.

use rustix::io::Errno;
use shadowbell_driver::{CommandError, DmaError, IoErrorKind, RequestError};
use shadowbell_spec::Status;
use std::io;
use std::sync::Arc;
use thiserror::Error;

/// Failure to open a block device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The controller does not have this namespace.
    #[error("there is no namespace {nsid} on {device}")]
    NoNamespace {
        /// Namespace identifier.
        nsid: u32,
        /// Human-readable name of the controller.
        device: String,
    },
    /// The format of the namespace's blocks is not supported by the driver.
    #[error(
        "namespace {nsid} {what}, which the driver does not support; format it with another LBA format"
    )]
    Unusable {
        /// Namespace identifier.
        nsid: u32,
        /// Unsupported property, which completes "the namespace ...".
        what: &'static str,
    },
    /// No queue pair is available.
    #[error("{device} has no queue pair left")]
    NoQueue {
        /// Human-readable name of the controller.
        device: String,
    },
    /// Memory could not be shared with the device.
    #[error(transparent)]
    Dma(#[from] DmaError),
    /// No thread or descriptor is available for a queue.
    #[error("a queue could not be started: {0}")]
    Start(io::Error),
}

/// Failed request.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum BlockError {
    /// The request extends beyond the end of the disk.
    #[error("{len} bytes at byte {offset} reach past the disk's {size} bytes")]
    OutOfRange {
        /// First byte of the request.
        offset: u64,
        /// Number of requested bytes.
        len: u64,
        /// Size of the disk in bytes.
        size: u64,
    },
    /// The disk is read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The controller does not support the command, and the request cannot be emulated.
    #[error("the controller has no {command} command")]
    Unsupported {
        /// Name of the command in the specification.
        command: &'static str,
    },
    /// An I/O command failed.
    #[error(transparent)]
    Command(#[from] IoErrorKind),
    /// An admin command failed.
    #[error("{0}")]
    Admin(Arc<CommandError>),
    /// The device has returned none of the buffers, so no command can be submitted.
    #[error("the device has returned no buffer; detach and attach again")]
    BuffersLost,
    /// A command completed without its buffer or with a too short one: a bug of this crate.
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
    /// The completion status, if the controller completed a command with an error.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Command(IoErrorKind::Status { status, .. }) => Some(*status),
            Self::Admin(error) => error.status(),
            _ => None,
        }
    }

    /// The error number for export protocols: `EPERM` for a read-only disk, `EINVAL` for a range
    /// beyond the end, `ENOTSUP` for an unsupported command, `ENOSPC` for a controller without free
    /// capacity, and `EIO` for everything else.
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
