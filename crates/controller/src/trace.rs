//! Doorbell trace: every doorbell decision, and the commands in between.
//!
//! A trace is a file of rings, one per I/O thread and one for the control plane. Each ring has a
//! single writer, which writes through a shared mapping: a record costs reading the clock, a copy
//! of 32 bytes and a store, but no system call, and survives a crash of the process. A full ring
//! overwrites its oldest records. [`read_trace`] merges the rings by time, also while they are
//! being written.
//!
//! # File format
//!
//! All numbers are little-endian.
//!
//! | offset | content |
//! |---|---|
//! | 0 | `Header`: describes the rest of the file |
//! | 64 + 64 r | number of records ever written to ring r; each count has its own cache line |
//! | the next multiple of 4096 | the rings, one after the other, of 32-byte records |

mod file;
mod layout;
mod reader;
mod record;

pub use file::{TraceFile, TraceRing};
pub use reader::{TraceError, read_trace};
pub use record::{COMPLETION_QUEUE, Kind, Queue, Record};

#[cfg(test)]
mod tests;
