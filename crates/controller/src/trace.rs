//! Doorbell trace: a record of each decision about a doorbell, each command and each completion.
//!
//! A trace is a file with one ring per I/O thread and one for the control plane. Each ring has one
//! writing thread, which writes through a shared mapping. A record costs a read of the clock, a
//! copy of 32 bytes and a store, but no system call, and survives a crash of the process. In a full
//! ring, the newest record overwrites the oldest one. [`read_trace`] merges the rings by time, even
//! while they are being written.
//!
//! # File format
//!
//! All numbers are little-endian.
//!
//! | offset | contents |
//! |---|---|
//! | 0 | `Header` |
//! | 64 + 64 r | number of records ever written to ring r; each count has its own cache line |
//! | next multiple of 4096 | the rings, one after the other: arrays of records of 32 bytes |

mod file;
mod record;

pub use file::{TraceError, TraceFile, TraceRing, read_trace};
pub use record::{COMPLETION_QUEUE, Kind, Queue, Record};

#[cfg(test)]
mod tests;
