//! I/O command execution: from a fetched submission queue entry to disk requests and a status.

mod copy;
mod data_pointer;
mod engine;
mod exclusive;
mod exclusive_state;
mod in_flight;
mod multi_step;
mod namespace;
mod other;
pub(crate) mod prefetch;
mod quota;
mod transfer;

pub(crate) use engine::{Closed, Engine, Started};
pub(crate) use in_flight::CompletedCommand;
pub(crate) use namespace::NamespaceQueue;
pub(crate) use quota::Exceeded;
pub use quota::Quota;
