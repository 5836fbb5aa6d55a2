//! I/O threads, which serve I/O queues.
//!
//! An I/O thread owns its submission queues, their completion queues and its disk queues; no other
//! thread touches these. The control plane communicates with it by messages only.

mod backlog;
mod busy;
mod controller_queues;
mod doorbell_sources;
pub(crate) mod errors;
mod fused;
mod mailbox;
pub(crate) mod message;
mod meter;
mod moving;
pub(crate) mod observer;
mod poll_group;
mod poll_window;
mod pool;
mod queue_changes;
pub(crate) mod queue_override;
pub(crate) mod queue_set;
mod recovery;
pub(crate) mod relocation;
mod replay;
mod share;
mod slow;
pub(crate) mod trace;
#[expect(clippy::module_inception, reason = "the thread itself is one of the module's parts")]
mod worker;

pub use poll_window::Polling;
pub use pool::{CLAIMABLE, MAX_WORKERS, Pool, PoolOptions, Turns};
