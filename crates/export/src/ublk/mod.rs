//! ublk export: the disk as a block device of this machine, `/dev/ublkbN`, through the kernel's
//! driver for block devices in user space (`ublk_drv`).
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`Ublk`] | lifecycle of a device |
//! | `add_device` | adding a device, or taking over one of a dead server |
//! | `parameters` | the device parameters of the disk |
//! | `serve` | the thread of one queue |
//! | `request` | validation and execution of a request |
//! | `zero_copy` | zero-copy execution on the disk's own file |
//! | `wire` | structures and constants of the driver |
//! | `sys` | the driver's commands, which use io_uring: the only `unsafe` code here |
//!
//! The device has a kernel queue for each queue of the disk, and each of them has a thread. The
//! transfer of data is fixed when the device is created:
//!
//! * The driver copies: into the buffer of the request's tag before the server sees the request,
//!   and out of the buffer after the server has answered.
//! * Zero copy: the driver registers the request's memory with the ring of the queue
//!   (`UBLK_F_AUTO_BUF_REG`, in the form of Linux 6.17). If the disk is a raw image or a block
//!   device in this process and bypasses the page cache, the thread reads and writes it by that
//!   ring, directly from and to the registered memory, without a copy. Other requests go to the
//!   thread's queue on the disk (discards, zeroes, flushes, and data whose address the storage
//!   refuses). So do all requests if such a device is taken over with another kind of disk. The
//!   server then copies their data from and to the kernel (`UBLK_F_USER_COPY`).
//!
//! # When the server dies
//!
//! The device stays, and its users wait. The next server that [takes it over](Options::recover)
//! gets the requests that were not answered again: reads and writes of the same bytes to the same
//! places, which can be repeated. The kernel does not pass a request to the next server as long
//! as a call of the dead one uses the request's memory.
//!
//! # Not implemented
//!
//! Zones, integrity data, devices of users other than root, and resizing.

mod add_device;
mod device;
mod error;
mod parameters;
mod request;
mod serve;
mod zero_copy;
// The commands of the kernel's driver access memory of this process.
#[allow(unsafe_code)]
mod sys;
mod wire;

pub use device::{Options, Ublk, WhyCopied, promise_progress};
pub use error::UblkError;
