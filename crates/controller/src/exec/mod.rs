//! I/O command execution: from a fetched submission queue entry to disk requests and a status.

mod alone;
mod appends;
mod both;
mod carry_out_alone;
mod changed_namespaces;
mod copy;
mod engine;
mod forced;
mod giving_up;
mod in_flight;
mod less_common;
mod long;
mod namespace;
mod own_requests;
pub(crate) mod prefetch;
mod progress;
mod protected;
mod protected_copy;
mod quota;
mod reservation;
mod reservation_commands;
mod resolve;
mod retired;
mod spans;
mod status;
mod transfer;
mod with_metadata;
mod zoned;

pub(crate) use engine::{Closed, Engine, Started};
pub(crate) use in_flight::CompletedCommand;
pub(crate) use namespace::NamespaceQueue;
pub(crate) use quota::Exceeded;
pub use quota::Quota;
