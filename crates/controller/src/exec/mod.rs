//! I/O commands: from a fetched entry to requests of a disk, and back to a status.

mod alone;
mod carry_out_alone;
mod copy;
mod engine;
mod forced;
mod in_flight;
mod long;
mod namespace;
pub(crate) mod prefetch;
mod quota;
mod reservation;
mod reservation_commands;
mod resolve;
mod retired;
mod spans;
mod status;

pub(crate) use engine::{Closed, Engine, Started};
pub(crate) use in_flight::CompletedCommand;
pub(crate) use namespace::NamespaceQueue;
pub(crate) use quota::Exceeded;
pub use quota::Quota;
