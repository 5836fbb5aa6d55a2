//! Error types of block devices.

use rustix::io::Errno;
use shadowbell_disk::DiskError;
use shadowbell_spec::Status;
use thiserror::Error;

/// Failure to open a block device.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The disk has zones, which do not permit writes of arbitrary ranges.
    #[error("{disk}: a zoned disk is no block device; leave out `zoned`")]
    Zoned {
        /// Name of the disk.
        disk: String,
    },
}

/// Failed request.
#[derive(Clone, Copy, Debug, Error)]
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
    /// The disk does not support the operation, and it cannot be emulated.
    #[error("the disk does not support {operation}")]
    Unsupported {
        /// Name of the operation.
        operation: &'static str,
    },
    /// A request to the disk failed.
    #[error("{}", text(*.0))]
    Disk(DiskError),
    /// The disk has not completed the request within the timeout.
    #[error("the disk has not completed the request within the timeout")]
    TimedOut,
    /// A request completed without its buffer, or with a buffer that is too short: a bug of this
    /// crate.
    #[error("a buffer does not fit its request, which is a defect of the block layer")]
    Buffer,
}

/// Message about a disk error. If the error has an NVMe status, the message has the name of the
/// status.
fn text(error: DiskError) -> String {
    match error {
        DiskError::Device(bits) => format!("the device failed: {}", Status::from_bits(bits)),
        error => error.to_string(),
    }
}

impl From<DiskError> for BlockError {
    fn from(error: DiskError) -> Self {
        Self::Disk(error)
    }
}

impl BlockError {
    /// The disk's error, if the disk failed a request.
    #[must_use]
    pub fn disk(&self) -> Option<DiskError> {
        match self {
            Self::Disk(error) => Some(*error),
            _ => None,
        }
    }

    /// The error number for export protocols: `EPERM` for a read-only disk, `EINVAL` for a range
    /// beyond the end, `ENOTSUP` for an unsupported operation, `ENOSPC` for storage without free
    /// capacity, and `EIO` for all other errors.
    #[must_use]
    pub fn errno(&self) -> Errno {
        match self {
            Self::ReadOnly | Self::Disk(DiskError::ReadOnly) => Errno::PERM,
            Self::OutOfRange { .. } => Errno::INVAL,
            Self::Unsupported { .. } | Self::Disk(DiskError::Unsupported) => Errno::NOTSUP,
            Self::Disk(DiskError::NoSpace) => Errno::NOSPC,
            Self::Disk(DiskError::Device(bits)) => match Status::from_bits(*bits).code() {
                Status::NAMESPACE_WRITE_PROTECTED | Status::ATTEMPT_TO_WRITE_RO_RANGE => {
                    Errno::PERM
                }
                Status::CAPACITY_EXCEEDED => Errno::NOSPC,
                _ => Errno::IO,
            },
            _ => Errno::IO,
        }
    }
}
