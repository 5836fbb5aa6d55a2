//! The disk as a block device of this machine, `/dev/ublkbN`, through the kernel's driver for block
//! devices in user space (`ublk_drv`).
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`Ublk`] | a device, from its beginning to its end |
//! | `acquire` | adding a device, or taking one over |
//! | `parameters` | what the driver knows of the disk |
//! | `serve` | the thread of one queue |
//! | `request` | what is asked for, and carrying it out |
//! | `straight` | carrying it out without a copy, on the disk's own file |
//! | `wire` | the driver's structures and numbers |
//! | `sys` | its commands, which are io_uring's: the only `unsafe` here |
//!
//! The kernel's block layer has a queue for each of the disk's, and each has a thread. How the data
//! of requests move is settled for a device when it is made:
//!
//! * The driver copies them, into the buffer of the request's tag before we see it, and out of it
//!   when we have answered.
//! * The driver registers the request's memory with the ring of the queue (`UBLK_F_AUTO_BUF_REG`,
//!   as Linux has it since 6.17). If the disk is a raw image or a block device in this process,
//!   past the page cache, the thread reads and writes it by that ring, to and from that memory:
//!   nobody copies, and no controller is asked. Everything else goes to the disk as ever (discards,
//!   zeroes, flushes, and what the storage refuses for its address), and so do all requests if such
//!   a device is taken over with another kind of disk; then it is we who copy the data, from and to
//!   the driver (`UBLK_F_USER_COPY`).
//!
//! # When the server dies
//!
//! The device stays, and what uses it waits. The next server that [takes it
//! over](Options::recover) gets the requests that were not answered once more: reads and writes
//! of the same bytes to the same places, which can be done twice. The kernel does not give a
//! request to the next server as long as a call of the last one is under way with its memory.
//!
//! # What it does not implement
//!
//! Zones, integrity data, devices that belong to a user who is not root, and sizes that
//! change.

mod acquire;
mod device;
mod error;
mod parameters;
mod request;
mod serve;
mod straight;
// Commands of the kernel's driver on memory of ours.
#[allow(unsafe_code)]
mod sys;
mod wire;

pub use crate::local_disk::LocalDisk;
pub use device::{Options, Ublk, WhyCopied, promise_progress};
pub use error::UblkError;
