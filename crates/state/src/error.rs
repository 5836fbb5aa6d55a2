//! Error of the serialization or the transfer of a state.

use crate::version::READABLE;
use std::io;

/// Error of the serialization or the transfer of a state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The socket failed, or the peer has closed it.
    #[error("the state could not be passed on: {0}")]
    Io(#[from] io::Error),
    /// The received bytes are no state.
    #[error("what came is no state of a server: {0}")]
    NotAState(&'static str),
    /// The version of the state is not supported.
    #[error(
        "the state has version {0}, and this program reads versions {first} to {last}: \
         use a program of a release next to the one that runs",
        first = READABLE.start(), last = READABLE.end()
    )]
    Version(u32),
    /// The state exceeds the largest size that is accepted.
    #[error("the state is too large: {0} bytes or descriptors")]
    TooLarge(u64),
    /// A section does not have the expected form.
    #[error("section {name} of the state can not be read: {source}")]
    Section {
        /// Name of the section.
        name: String,
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// A section name occurs twice.
    #[error("section {0} of the state is there twice")]
    Twice(String),
    /// A mandatory section is unknown.
    #[error(
        "this program does not know section {0} of the state, without which nothing can go on: \
         use a newer program"
    )]
    Unknown(String),
    /// A descriptor reference is invalid, or the descriptor was already taken.
    #[error("the state names descriptor {0}, which is not there")]
    NoDescriptor(u32),
}
