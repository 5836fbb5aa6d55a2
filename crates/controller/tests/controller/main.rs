//! Controller driven by a host in the same process: its commands, features, doorbells and failures.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/held.rs"]
mod held;
#[path = "../common/shared.rs"]
mod shared;

mod admin_flood;
mod admin_reset;
mod ana;
mod copy;
mod diagnostics;
mod doorbell_source;
mod driven;
mod fua;
mod fused;
mod hung_nbd;
mod io;
mod journal_model;
mod keep_alive;
mod latency_stats;
mod lba_status;
mod metadata;
mod pool;
mod prefetch_hint;
mod relocation;
mod reservations;
mod shadow;
mod successor;
mod uncorrectable;
mod windows;
mod zoned;
