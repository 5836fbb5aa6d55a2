//! Why a disk could not be opened, in sentences for the person who named it.

use std::io;

/// Why a disk could not be opened. Each message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The specification makes no sense.
    #[error("`{spec}` names no disk: {why}")]
    Spec {
        /// What was written.
        spec: String,
        /// What is wrong with it, and what may be written instead.
        why: String,
    },
    /// The memory for a disk in memory is not to be had.
    #[error(
        "a disk of {} does not fit this process's memory; choose a smaller one",
        crate::uri::format_size(*.bytes)
    )]
    Memory {
        /// The size asked for, in bytes.
        bytes: u64,
        /// The reason.
        source: memory::MapError,
    },
    /// The system refused something that has no case of its own.
    #[error("{path}: {what} failed: {source}")]
    System {
        /// The file.
        path: String,
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}
