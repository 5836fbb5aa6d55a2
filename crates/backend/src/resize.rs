//! A disk with another number of blocks, or one that takes writes or does not.

use std::io;

/// Why a disk can not have another size, or take writes from now on, or take none.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ResizeError {
    /// No disk of its kind can have one.
    #[error(
        "{disk}: a disk of this kind has the same size for as long as it is open; remove the \
         namespace, change its disk, and add it again"
    )]
    Impossible {
        /// The disk.
        disk: String,
    },
    /// Whether a disk of its kind takes writes is said when it is opened.
    #[error(
        "{disk}: whether it takes writes is settled when it is opened; remove the namespace and \
         add it again"
    )]
    Opened {
        /// The disk.
        disk: String,
    },
    /// The memory of the disk belongs to this process alone, and is in one piece.
    #[error("{disk}: memory that belongs to this process alone can not grow")]
    Private {
        /// The disk.
        disk: String,
    },
    /// The storage has no such size.
    #[error("{disk}: its file has {there} bytes, and {wanted} are wanted; make it larger first")]
    Short {
        /// The disk.
        disk: String,
        /// Bytes that there are.
        there: u64,
        /// Bytes that are to be there.
        wanted: u64,
    },
    /// Where its metadata are depends on its size.
    #[error("{disk}: its blocks have metadata, whose place depends on its size: that is settled")]
    Metadata {
        /// The disk.
        disk: String,
    },
    /// How many zones there are is settled when they are made.
    #[error("{disk}: how many zones it has was settled when they were made")]
    Zoned {
        /// The disk.
        disk: String,
    },
    /// The size is none that a disk can have.
    #[error(
        "{disk}: {bytes} bytes are no size of a disk with blocks of {block_size} bytes: it has to \
         be a multiple of that, and at least one block"
    )]
    Size {
        /// The disk.
        disk: String,
        /// What was wanted, in bytes.
        bytes: u64,
        /// Bytes in a block.
        block_size: u32,
    },
    /// The system refused.
    #[error("{disk}: its size can not be changed: {source}")]
    System {
        /// The disk.
        disk: String,
        /// Its reason.
        source: io::Error,
    },
}
