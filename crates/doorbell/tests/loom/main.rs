//! Exhaustive models of the doorbell protocol: every interleaving, and every reordering that
//! the memory model allows.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p shadowbell-doorbell --release --test loom`.
//!
//! A lost wakeup becomes a deadlock: the controller blocks on a signal that never comes. The models
//! run the shipped code; only the atomics are loom's. The models in `defects` leave out one fence
//! or one rule, and each has to fail.
#![cfg(loom)]
#![forbid(unsafe_code)]

mod defects;
mod enabling;
mod full;
mod invalid;
mod park;
mod relocate;
mod rig;
mod submit;
mod trap;
