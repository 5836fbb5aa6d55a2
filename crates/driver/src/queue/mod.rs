//! Components of the admin queue pair and of I/O queue pairs.
//!
//! | module | contents |
//! |---|---|
//! | `doorbell`, `shadow_pages` | a doorbell: its shadow entry and its register |
//! | `layout` | addresses and sizes of a queue pair, for the commands that create it |
//! | `core` | rings and command slots: submit, ring, take completions |
//! | `tagged` | entries with tags of protection information and a metadata pointer |
//! | `retry` | late commands, and their second submission |
//! | `memory` | memory of queues |
//! | `spin`, `stats` | polling time before a sleep; counters |

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
