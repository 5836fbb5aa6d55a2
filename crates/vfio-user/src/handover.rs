//! Errors in the transfer of a client to another server process.
//!
//! [`server`](crate::server) describes the transfer.

use std::io;

use shadowbell_state::StateError;

/// Error in saving a client. The current server process continues to serve the client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// This client cannot be transferred, for the given reason.
    #[error("this client cannot move to another process: {0}")]
    Client(String),
    /// This device type does not support the transfer.
    #[error("this device type cannot move to another process")]
    Device,
    /// A descriptor cannot be duplicated.
    #[error("a descriptor cannot be duplicated for another process: {0}")]
    Io(#[from] io::Error),
    /// The state cannot be serialized.
    #[error("the state of the device cannot be serialized: {0}")]
    Json(#[from] serde_json::Error),
}

/// Error in restoring a client. The process that saved the client can continue to serve it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// This client cannot be restored, for the given reason.
    #[error("this client cannot be restored: {0}")]
    Client(String),
    /// This device type does not support the transfer.
    #[error("this device type cannot be restored")]
    Device,
    /// A system call failed.
    #[error("a socket cannot be restored: {0}")]
    Io(#[from] io::Error),
    /// The saved state cannot be parsed.
    #[error("the saved state of the device is invalid: {0}")]
    Json(#[from] serde_json::Error),
    /// A descriptor is missing, or the state is invalid.
    #[error(transparent)]
    State(#[from] StateError),
}
