//! I/O command execution: from a fetched submission queue entry to disk requests and a status.

mod abort;
mod appends;
mod changed_namespaces;
mod compare_and_write;
mod copy;
mod draining;
mod engine;
mod exclusive;
mod exclusive_state;
mod fua_read;
mod in_flight;
mod internal;
mod metadata;
mod metadata_commands;
mod multi_step;
mod namespace;
mod other;
pub(crate) mod prefetch;
mod progress;
mod quota;
mod reservation;
mod reservation_commands;
mod resolve;
mod status;
mod touched;
mod transfer;
mod zoned;

pub(crate) use engine::{Closed, Engine, Started};
pub(crate) use in_flight::CompletedCommand;
pub(crate) use namespace::NamespaceQueue;
pub(crate) use quota::Exceeded;
pub use quota::Quota;
