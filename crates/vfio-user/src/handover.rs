//! Errors of transferring a client to another server process.
//!
//! The transfer is described in [`server`](crate::server).

use std::io;

use shadowbell_state::StateError;

/// Error of saving a client. The current server process continues to serve it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The reactor is not frozen.
    #[error("the server has to be frozen before its clients are handed over")]
    NotFrozen,
    /// This client cannot be transferred, for the given reason.
    #[error("this client can not be handed over because {0}")]
    Client(String),
    /// This device type does not support the transfer.
    #[error("a device of this kind can not be handed over")]
    Device,
    /// A descriptor cannot be duplicated.
    #[error("a descriptor can not be handed over: {0}")]
    Io(#[from] io::Error),
    /// The state cannot be serialized.
    #[error("the state of a device can not be written: {0}")]
    Json(#[from] serde_json::Error),
}

/// Error of restoring a client. The process that saved it can continue to serve it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// This client cannot be restored, for the given reason.
    #[error("this client can not be taken over because {0}")]
    Client(String),
    /// This device type does not support the transfer.
    #[error("a device of this kind can not be taken over")]
    Device,
    /// A system call failed.
    #[error("a socket can not be taken over: {0}")]
    Io(#[from] io::Error),
    /// The saved state cannot be parsed.
    #[error("the saved state of a device can not be read: {0}")]
    Json(#[from] serde_json::Error),
    /// A descriptor is missing, or the state is invalid.
    #[error(transparent)]
    State(#[from] StateError),
}
