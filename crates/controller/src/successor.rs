//! Why one controller can not go on where another has come to rest.

use crate::config::ConfigError;
use crate::route::RelocateError;
use shadowbell_memory::MapError;
use shadowbell_state::StateError;
use std::io;

/// Why the state of a controller can not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// It is not at rest: [`Controller::freeze`](crate::Controller::freeze) comes first.
    #[error("the controller is at work")]
    AtWork,
    /// Faults are injected, of which the successor would know nothing.
    #[error("the controller has faults injected, which can not be passed on")]
    Overridden,
    /// Its host makes namespaces, and what from stays here.
    #[error("the controller has a pool of namespaces, which stays on this machine")]
    Pool,
    /// The system's.
    #[error("a descriptor of the controller could not be duplicated: {0}")]
    System(#[from] io::Error),
}

/// Why a controller can not go on from a state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    /// The configuration is not possible.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The configuration differs from what the host has seen.
    #[error("the host has seen another {0} than what is configured here")]
    Shape(&'static str),
    /// The state contradicts itself.
    #[error("the state of the controller can not be: {0}")]
    Invalid(&'static str),
    /// A descriptor is missing.
    #[error(transparent)]
    State(#[from] StateError),
    /// The page of doorbells could not be mapped.
    #[error("the page of doorbells: {0}")]
    Memory(#[from] MapError),
    /// The system's.
    #[error("a descriptor of the controller could not be used: {0}")]
    System(#[from] io::Error),
    /// It had a worker of its own, and can not have one here.
    #[error(transparent)]
    Worker(#[from] RelocateError),
}
