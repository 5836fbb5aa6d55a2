//! Components of the admin queue pair and of I/O queue pairs.
//!
//! | module | contents |
//! |---|---|
//! | `doorbell` | a doorbell: its shadow entry and its register |
//! | `core` | rings and command slots: submit, ring, take completions |
//! | `tagged` | entries with tags of protection information and a metadata pointer |
//! | `retry` | late commands, and their second submission |
//! | `memory` | memory of queues; addresses and sizes for the commands that create them |
//! | `spin`, `stats` | polling time before a sleep; counters |

mod core;
mod doorbell;
mod memory;
mod retry;
mod spin;
mod stats;
mod tagged;

pub(crate) use self::core::Core;
pub(crate) use self::doorbell::{Doorbell, Register, ShadowCells, ShadowPages};
pub(crate) use self::memory::{PairShape, QueueLayout, QueueMemory};
pub(crate) use self::retry::RetryTable;
pub use self::spin::SpinPolicy;
pub(crate) use self::spin::SpinWindow;
pub use self::stats::QueueStats;
