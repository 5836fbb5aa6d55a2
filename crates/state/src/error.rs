//! Why a state can not be given or taken.

use crate::version::READABLE;
use std::io;

/// Why a state can not be given or taken.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The socket failed, or the other end is gone.
    #[error("the state could not be passed on: {0}")]
    Io(#[from] io::Error),
    /// What came is no state.
    #[error("what came is no state of a server: {0}")]
    NotAState(&'static str),
    /// The state has a version that this program does not read.
    #[error(
        "the state has version {0}, and this program reads versions {first} to {last}: \
         use a program of a release next to the one that runs",
        first = READABLE.start(), last = READABLE.end()
    )]
    Version(u32),
    /// The state is larger than any that a server has.
    #[error("the state is too large: {0} bytes or descriptors")]
    TooLarge(u64),
    /// A section does not have the form that it should have.
    #[error("section {name} of the state can not be read: {source}")]
    Section {
        /// Which one.
        name: String,
        /// Why.
        source: serde_json::Error,
    },
    /// A section is there twice.
    #[error("section {0} of the state is there twice")]
    Twice(String),
    /// A section that has to be understood is not known here.
    #[error(
        "this program does not know section {0} of the state, without which nothing can go on: \
         use a newer program"
    )]
    Unknown(String),
    /// The state names a descriptor that it does not have, or has given away.
    #[error("the state names descriptor {0}, which is not there")]
    NoDescriptor(u32),
}
