//! What the admin queue pair and the I/O queue pairs are made of.
//!
//! | module | what it is |
//! |---|---|
//! | `doorbell`, `shadow_pages` | a doorbell: its shadow entry and the register behind it |
//! | `layout` | where the queues of a pair lie, as the controller is given it |
//! | `core` | the rings and the slots of the commands: submit, ring, take completions |
//! | `retry` | commands that were late, and how they are submitted again |
//! | `memory` | the memory that queues lie in |
//! | `spin`, `stats` | how long to poll before a sleep; counters |

mod core;
mod doorbell;
mod layout;
mod memory;
mod retry;
mod shadow_pages;
mod spin;
mod stats;
mod tagged;

pub(crate) use self::core::Core;
pub(crate) use self::doorbell::{Doorbell, Register, ShadowCells};
pub(crate) use self::layout::QueueLayout;
pub(crate) use self::memory::{PairShape, QueueMemory};
pub(crate) use self::retry::RetryTable;
pub(crate) use self::shadow_pages::ShadowPages;
pub use self::spin::SpinPolicy;
pub(crate) use self::spin::SpinWindow;
pub use self::stats::QueueStats;
