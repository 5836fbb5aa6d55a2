//! I/O threads, which serve I/O queues.
//!
//! An I/O thread owns its submission queues, their completion queues and its disk queues; no other
//! thread touches these. The control plane communicates with it by messages only.

mod activity;
mod adaptive_poll;
mod controller_queues;
mod doorbell_sources;
mod fused;
pub(crate) mod mailbox;
pub(crate) mod observer;
mod poll_group;
mod pool;
pub(crate) mod queue_move;
pub(crate) mod queue_set;
mod recovery;
mod replay;
mod scheduling;
#[expect(clippy::module_inception, reason = "the thread itself is one of the module's parts")]
mod worker;

pub use activity::{notify_activity, wait_for_activity};
pub use adaptive_poll::Polling;
pub use doorbell_sources::{DoorbellSource, PolledDoorbells};
pub use pool::{CLAIMABLE, MAX_WORKERS, Pool, PoolOptions, Turns};
