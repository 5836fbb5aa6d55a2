//! Errors of opening an RBD image.

use std::io;

/// Error of opening an RBD image. Each message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The specification cannot be parsed.
    #[error("`{spec}` names no disk: {why}")]
    Spec {
        /// The specification as given.
        spec: String,
        /// Cause of the error.
        why: String,
    },
    /// Ceph's libraries are not installed, or cannot be loaded.
    #[error(
        "{disk}: Ceph's library cannot be loaded ({why}); install librbd1 (Debian), or librbd1 or \
         ceph-common (elsewhere)"
    )]
    Library {
        /// Specification of the image.
        disk: String,
        /// Error of the dynamic linker.
        why: String,
    },
    /// A call of Ceph's libraries failed.
    #[error("{disk}: {what} failed: {source}")]
    Ceph {
        /// Specification of the image.
        disk: String,
        /// The failed operation, and the option that it depends on.
        what: &'static str,
        /// Ceph's error.
        source: io::Error,
    },
    /// The disk of a dead process cannot be recovered.
    #[error("{disk} cannot be recovered: {why}")]
    NotThatDisk {
        /// Specification of the image.
        disk: String,
        /// Cause of the failure.
        why: String,
    },
    /// The size of the image is not valid for a disk.
    #[error(
        "{disk}: the size of the image, {size} bytes, is not valid with blocks of {block_size} \
         bytes: it must be a multiple of that, and at least one block; change it with `rbd resize`"
    )]
    Size {
        /// Specification of the image.
        disk: String,
        /// Size of the image in bytes.
        size: u64,
        /// Block size in bytes.
        block_size: u32,
    },
}

/// Operation that connects to the cluster.
pub(crate) const CONNECTING: &str = "connecting to the cluster";

impl OpenError {
    /// True if the cluster is unreachable, which may be temporary.
    pub(crate) fn is_for_now(&self) -> bool {
        matches!(self, Self::Ceph { what: CONNECTING, source, .. }
            if !matches!(source.raw_os_error(), Some(libc::EACCES | libc::EPERM)))
    }
}
