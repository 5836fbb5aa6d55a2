//! Doorbell trace: a record of every doorbell decision and of the commands between them.
//!
//! A trace file has one ring per I/O thread and one for the control plane. Each owner writes its
//! ring through a shared mapping: a record costs a clock read, a copy of 32 bytes and a store, but
//! no system call, and survives a crash of the process. A full ring overwrites its oldest records.
//! [`read_trace`] merges the rings by time, also while they are being written.
//!
//! # File format
//!
//! All numbers are little-endian.
//!
//! | offset | contents |
//! |---|---|
//! | 0 | `Header`: layout of the file |
//! | 64 + 64 r | records ever written to ring r; one cache line each, against false sharing |
//! | next multiple of 4096 | the rings, one after the other, of 32-byte records |

mod file;
mod layout;
mod reader;
mod record;

pub use file::{TraceFile, TraceRing};
pub use reader::{TraceError, read_trace};
pub use record::{COMPLETION_QUEUE, Kind, Queue, Record};

#[cfg(test)]
mod tests;
