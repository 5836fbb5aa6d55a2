//! What of a disk goes to another process.

use std::io;

/// Why a disk can not be handed over to another process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandOverError {
    /// No disk of its kind can be.
    #[error(
        "{disk}: a disk of this kind can not be handed over to another process in this release; \
         stop the server and start it again instead"
    )]
    Impossible {
        /// The disk.
        disk: String,
    },
    /// No disk of its kind can be gone on with after the death of its process.
    #[error("{disk}: a disk of this kind can not be gone on with if the server dies")]
    Mortal {
        /// The disk.
        disk: String,
    },
    /// This one can not be gone on with after the death of its process.
    #[error("{disk}: it can not be gone on with if the server dies: {why}")]
    Unfenced {
        /// The disk.
        disk: String,
        /// Why not, and what to do about it.
        why: &'static str,
    },
    /// The memory of the disk belongs to this process alone.
    #[error("{disk}: its memory belongs to this process alone, and would be lost")]
    Private {
        /// The disk.
        disk: String,
    },
    /// The system refused.
    #[error("{disk}: it can not be handed over: {source}")]
    System {
        /// The disk.
        disk: String,
        /// Its reason.
        source: io::Error,
    },
}
