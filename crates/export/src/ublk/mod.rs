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
//! The device has a kernel queue for each queue of the disk, and a thread for each of them. The
//! method of data transfer is fixed when the device is created:
//!
//! * Copy by the driver: the driver copies the data of a write into the buffer of the request's tag
//!   before the server gets the request, and the data of a read out of the buffer after the server
//!   has answered.
//! * Zero copy: the driver registers the request's memory with the ring of the queue
//!   (`UBLK_F_AUTO_BUF_REG`, in the form of Linux 6.17). If the disk is a raw image or a block
//!   device in this process and bypasses the page cache, the thread uses that ring to transfer data
//!   directly between the disk's file and the registered memory. Other requests (discards, zeroes,
//!   flushes, and data whose address the storage refuses) go to the thread's queue of the disk. If
//!   a zero-copy device is taken over with another kind of disk, all requests go to the thread's
//!   queue of the disk. The server then copies their data from and to the kernel
//!   (`UBLK_F_USER_COPY`).
//!
//! # When the server dies
//!
//! The device stays, and its users wait. The next server that [takes over the
//! device](Options::recover) gets the unanswered requests again. A repetition is safe, because it
//! reads or writes the same bytes at the same offset. While a call of the dead server uses a
//! request's memory, the kernel does not pass the request to the next server.
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
// `sys` needs `unsafe`, because the commands of the kernel's driver access memory of this process.
#[allow(unsafe_code)]
mod sys;
mod wire;

pub use device::{Options, Ublk, WhyCopied, mark_as_io_flusher};
pub use error::UblkError;
