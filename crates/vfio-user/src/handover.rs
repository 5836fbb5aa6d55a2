//! Why a client can not be handed over to another server, or not be taken over.
//!
//! How it is done is described in [`server`](crate::server).

use std::io;

use shadowbell_state::StateError;

/// Why something can not be handed over. Nothing has changed then: whoever has it goes on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The reactor is at work.
    #[error("the server has to be frozen before its clients are handed over")]
    NotFrozen,
    /// The device says why.
    #[error("this client can not be handed over because {0}")]
    Client(String),
    /// There is no way to do it, whoever the client is.
    #[error("a device of this kind can not be handed over")]
    Device,
    /// A descriptor could not be duplicated.
    #[error("a descriptor can not be handed over: {0}")]
    Io(#[from] io::Error),
    /// It can not be written down.
    #[error("the state of a device can not be written: {0}")]
    Json(#[from] serde_json::Error),
}

/// Why something can not be taken over. Whoever had it goes on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The device says why.
    #[error("this client can not be taken over because {0}")]
    Client(String),
    /// There is no way to do it, whoever the client is.
    #[error("a device of this kind can not be taken over")]
    Device,
    /// The system refuses.
    #[error("a socket can not be taken over: {0}")]
    Io(#[from] io::Error),
    /// What was saved does not have the form that it should have.
    #[error("the saved state of a device can not be read: {0}")]
    Json(#[from] serde_json::Error),
    /// A descriptor is missing.
    #[error(transparent)]
    State(#[from] StateError),
}
