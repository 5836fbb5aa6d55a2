//! Errors in saving and restoring the state of a controller.

use crate::config::ConfigError;
use crate::route::RelocateError;
use shadowbell_memory::MapError;
use shadowbell_state::StateError;
use std::io;

/// Error in saving the state of a controller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// The controller is not quiesced; call [`Controller::freeze`](crate::Controller::freeze)
    /// first.
    #[error("the controller is not quiesced")]
    AtWork,
    /// Fault injection is active, and its state cannot be saved.
    #[error("the controller has fault injection, whose state cannot be transferred")]
    Overridden,
    /// The controller has a namespace pool, whose storage cannot be migrated.
    #[error("the controller has a namespace pool, which cannot be migrated to another machine")]
    Pool,
    /// The system could not duplicate a descriptor.
    #[error("cannot duplicate a descriptor of the controller: {0}")]
    System(#[from] io::Error),
}

/// Error in restoring the state of a controller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The configuration differs from the one that the host has already seen.
    #[error("the configured {0} differs from what the host has seen")]
    Shape(&'static str),
    /// The state is inconsistent.
    #[error("the state of the controller is invalid: {0}")]
    Invalid(&'static str),
    /// A descriptor is missing.
    #[error(transparent)]
    State(#[from] StateError),
    /// The doorbell page could not be mapped.
    #[error("cannot map the doorbell page: {0}")]
    Memory(#[from] MapError),
    /// The system could not use a descriptor.
    #[error("cannot use a descriptor of the controller: {0}")]
    System(#[from] io::Error),
    /// The controller needs a dedicated I/O thread, and the pool cannot provide one.
    #[error(transparent)]
    Worker(#[from] RelocateError),
}
