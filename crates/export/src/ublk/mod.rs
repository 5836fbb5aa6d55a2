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
//! | `wire` | the driver's structures and numbers |
//! | `sys` | its commands, which are io_uring's: the only `unsafe` here |
//!
//! The kernel's block layer has a queue for each of the disk's, and each has a thread. The driver
//! copies the data of a request into its tag's buffer before we see it, and out of it when we
//! have answered.
//!
//! # When the server dies
//!
//! The device stays, and what uses it waits. The next server that [takes it
//! over](Options::recover) gets the requests that were not answered once more: reads and writes
//! of the same bytes to the same places, which can be done twice.
//!
//! # What it does not implement
//!
//! Zero copy, zones, integrity data, devices that belong to a user who is not root, and sizes that
//! change.

mod acquire;
mod device;
mod error;
mod parameters;
mod request;
mod serve;
// Commands of the kernel's driver on memory of ours.
#[allow(unsafe_code)]
mod sys;
mod wire;

pub use device::{Options, Ublk, promise_progress};
pub use error::UblkError;
