//! Errors of transferring a disk to another process.

use std::io;

/// Error of serializing a disk for another process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandOverError {
    /// This disk type does not support the transfer.
    #[error(
        "{disk}: this disk type cannot be passed to another process in this release; stop the \
         server and start it again instead"
    )]
    Impossible {
        /// Name of the disk.
        disk: String,
    },
    /// This disk type cannot be recovered after a crash of the server process.
    #[error("{disk}: this disk type cannot be recovered after a server crash")]
    Mortal {
        /// Name of the disk.
        disk: String,
    },
    /// This disk cannot be recovered after a crash of the server process.
    #[error("{disk}: it cannot be recovered after a server crash: {why}")]
    Unfenced {
        /// Name of the disk.
        disk: String,
        /// The reason, and what to do about it.
        why: &'static str,
    },
    /// The disk is anonymous memory, which only this process can map.
    #[error("{disk}: its memory is private to this process, and would be lost")]
    Private {
        /// Name of the disk.
        disk: String,
    },
    /// A system call failed.
    #[error("{disk}: it cannot be passed to another process: {source}")]
    System {
        /// Name of the disk.
        disk: String,
        /// The system's error.
        source: io::Error,
    },
}
