//! Error of the serialization or the transfer of a state.

use crate::version::READABLE;
use std::io;

/// Error of the serialization or the transfer of a state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The socket failed, or the peer has closed it.
    #[error("the state could not be passed on: {0}")]
    Io(#[from] io::Error),
    /// The received bytes are not a state.
    #[error("the received data is no server state: {0}")]
    NotAState(&'static str),
    /// The version of the state is not supported.
    #[error(
        "the state is too {age}: it has version {0}, and this program reads versions {first} to \
         {last}: use a release next to the running one",
        age = if .0 < READABLE.start() { "old" } else { "new" },
        first = READABLE.start(), last = READABLE.end()
    )]
    Version(u32),
    /// The state exceeds the largest size that is accepted.
    #[error("the state is too large: {0} bytes or descriptors")]
    TooLarge(u64),
    /// A section does not have the expected form.
    #[error("section {name} of the state cannot be read: {source}")]
    Section {
        /// Name of the section.
        name: String,
        /// Error of the parser.
        source: serde_json::Error,
    },
    /// Two sections have the same name.
    #[error("section {0} of the state occurs twice")]
    Twice(String),
    /// A mandatory section is unknown.
    #[error(
        "this program does not support the mandatory section {0} of the state: use a newer program"
    )]
    Unknown(String),
    /// A field is unknown, and the state has another meaning without it.
    #[error(
        "section {name} of the state has the field {field}, which this program does not support: \
         the state is too new, use a newer program"
    )]
    UnknownField {
        /// Name of the section.
        name: String,
        /// Path of the field in the section.
        field: String,
    },
    /// A descriptor reference is invalid, or the descriptor was already taken.
    #[error("the state refers to descriptor {0}, which does not exist")]
    NoDescriptor(u32),
}

impl StateError {
    /// True if the state is of a release that this program does not support.
    #[must_use]
    pub fn is_of_another_release(&self) -> bool {
        matches!(self, Self::Version(_) | Self::Unknown(_) | Self::UnknownField { .. })
    }
}
