//! Why an image can not be a disk, in sentences for the person who named it.

use std::io;

/// Why an image can not be a disk. Each message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The specification makes no sense.
    #[error("`{spec}` names no disk: {why}")]
    Spec {
        /// What was written.
        spec: String,
        /// What is wrong with it.
        why: String,
    },
    /// Ceph's libraries are not there.
    #[error(
        "{disk}: Ceph's library can not be loaded ({why}); install librbd1 (Debian), librbd1 or \
         ceph-common elsewhere"
    )]
    Library {
        /// The image.
        disk: String,
        /// The system's reason.
        why: String,
    },
    /// A step towards the image failed.
    #[error("{disk}: {what} failed: {source}")]
    Ceph {
        /// The image.
        disk: String,
        /// What was tried, and what it depends on.
        what: &'static str,
        /// Ceph's reason.
        source: io::Error,
    },
    /// It is not the image that the process before had.
    #[error("{disk}: it can not be gone on with: {why}")]
    NotThatDisk {
        /// The image.
        disk: String,
        /// What is wrong with it.
        why: String,
    },
    /// The size of the image is none that a disk can have.
    #[error(
        "{disk}: the {size} bytes of the image are no size of a disk with blocks of {block_size} \
         bytes: it has to be a multiple of that, and at least one block; change it by `rbd resize`"
    )]
    Size {
        /// The image.
        disk: String,
        /// Bytes of the image.
        size: u64,
        /// Bytes of a block.
        block_size: u32,
    },
}

/// The step in which the cluster is reached.
pub(crate) const CONNECTING: &str = "connecting to the cluster";

impl OpenError {
    /// Whether the cluster was not to be reached, which may change.
    pub(crate) fn is_for_now(&self) -> bool {
        matches!(self, Self::Ceph { what: CONNECTING, source, .. }
            if !matches!(source.raw_os_error(), Some(libc::EACCES | libc::EPERM)))
    }
}
