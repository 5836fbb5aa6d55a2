//! The doorbell trace: every decision about a doorbell, one by one, and the commands between them.
//!
//! A trace is a file of rings, one for each worker and one for the control plane, which their
//! owners write through a shared mapping: a record costs the clock, a copy of 32 bytes and a store,
//! no system call, and what was recorded survives a crash of the process. When a ring is full its
//! oldest records give way. [`read_trace`] merges the rings by time, while they are being written
//! too.
//!
//! # The file
//!
//! All numbers are little-endian.
//!
//! | offset | what |
//! |---|---|
//! | 0 | `Header`: what the rest is |
//! | 64 + 64 r | how many records were ever written to ring r (each count in a line of its own, so that two workers never share one) |
//! | the next multiple of 4096 | the rings, one after the other, of records of 32 bytes |

mod file;
mod record;

pub use file::{TraceError, TraceFile, TraceRing, read_trace};
pub use record::{COMPLETION_QUEUE, Kind, Queue, Record};

#[cfg(test)]
mod tests;
