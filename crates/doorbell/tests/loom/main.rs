//! The protocol under every interleaving, and every reordering that the memory model allows.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p shadowbell-doorbell --release --test loom`.
//!
//! A lost wakeup shows as a deadlock: the controller blocks on a signal that nobody is going to
//! give. The models run the code that ships; only the atomics underneath are loom's. `defects`
//! turns that around: with one fence or one rule taken away, every model there has to fail.
#![cfg(loom)]
#![forbid(unsafe_code)]

mod defects;
mod enabling;
mod full;
mod park;
mod relocate;
mod rig;
mod submit;
mod trap;
