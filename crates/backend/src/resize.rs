//! Errors of changing a disk's size or write protection.

use std::io;

/// Error of changing the size or the write protection of an open disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// This disk type cannot be resized.
    #[error(
        "{disk}: a disk of this kind has the same size for as long as it is open; remove the \
         namespace, change its disk, and add it again"
    )]
    Impossible {
        /// Name of the disk.
        disk: String,
    },
    /// This disk type has the write protection that it was opened with.
    #[error(
        "{disk}: whether it takes writes is settled when it is opened; remove the namespace and \
         add it again"
    )]
    Opened {
        /// Name of the disk.
        disk: String,
    },
    /// Anonymous memory that belongs to this process alone cannot grow.
    #[error("{disk}: memory that belongs to this process alone can not grow")]
    Private {
        /// Name of the disk.
        disk: String,
    },
    /// The storage is smaller than the requested size.
    #[error("{disk}: its file has {there} bytes, and {wanted} are wanted; make it larger first")]
    Short {
        /// Name of the disk.
        disk: String,
        /// Current size of the storage in bytes.
        there: u64,
        /// Requested size in bytes.
        wanted: u64,
    },
    /// The position of the metadata on the disk depends on its size.
    #[error("{disk}: its blocks have metadata, whose place depends on its size: that is settled")]
    Metadata {
        /// Name of the disk.
        disk: String,
    },
    /// The number of zones is fixed when they are created.
    #[error("{disk}: how many zones it has was settled when they were made")]
    Zoned {
        /// Name of the disk.
        disk: String,
    },
    /// The size is zero or not a multiple of the block size.
    #[error(
        "{disk}: {bytes} bytes are no size of a disk with blocks of {block_size} bytes: it has to \
         be a multiple of that, and at least one block"
    )]
    Size {
        /// Name of the disk.
        disk: String,
        /// Requested size in bytes.
        bytes: u64,
        /// Block size in bytes.
        block_size: u32,
    },
    /// A system call failed.
    #[error("{disk}: its size can not be changed: {source}")]
    System {
        /// Name of the disk.
        disk: String,
        /// The system's error.
        source: io::Error,
    },
}
