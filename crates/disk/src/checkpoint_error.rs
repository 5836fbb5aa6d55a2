//! Errors of serializing a disk for recovery.

use std::io;

/// Error of serializing a disk for the next process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// This disk type cannot be recovered after a crash of the server process.
    #[error("{disk}: this disk type cannot be recovered after a server crash")]
    Mortal {
        /// Name of the disk.
        disk: String,
    },
    /// The storage offers no fence for requests of a dead process, so this disk cannot be
    /// recovered.
    #[error("{disk}: it cannot be recovered after a server crash: {why}")]
    Unfenced {
        /// Name of the disk.
        disk: String,
        /// Reason, and the remedy.
        why: &'static str,
    },
    /// The disk is anonymous memory, which only this process can map.
    #[error("{disk}: its memory is private to this process, and would be lost")]
    Private {
        /// Name of the disk.
        disk: String,
    },
    /// A system call failed.
    #[error("{disk}: its state cannot be stored for recovery: {source}")]
    System {
        /// Name of the disk.
        disk: String,
        /// The system's error.
        source: io::Error,
    },
}
