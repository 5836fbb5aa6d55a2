//! A block device on the user-space driver, for everyone else.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`nbd`] | the disk behind a socket: QEMU, libnbd's tools, fio, the kernel's NBD client |
//! | [`fuse`] | the disk as a file, and through a loop device as a block device |
//! | [`vhost`] | the disk as a virtio-blk device: QEMU, Cloud Hypervisor |
//! | [`ublk`] | the disk as a block device of this machine, through the kernel's `ublk_drv` |
//! | `io_thread` | a thread that serves requests: it drives the queue that they go through |
//! | `tasks` | requests in flight, as futures in numbered slots of the thread that serves them |
//! | `lent`, `depth` | on which of two threads a client is served: how many requests it keeps in flight |
//! | `data`, `vectors` | the data of requests: where they lie, and how the kernel is told |
//! | `queue_server` | a thread that serves the disk's queues, lent to whoever serves a client |
//! | `local_disk` | a disk of this process, from which a device may be served |
//! | `failures` | counts requests that failed because the disk did |
//!
//! Every way to export has threads of its own, each of which uses one of the disk's queues. What
//! comes from outside is checked before it gets anywhere near the disk; what the disk says comes
//! back as the error that the protocol names.
#![deny(unsafe_code)]

#[cfg(any(feature = "nbd", feature = "fuse"))]
mod data;
#[cfg(any(feature = "nbd", feature = "fuse"))]
mod depth;
#[cfg(any(feature = "nbd", feature = "fuse", feature = "ublk", feature = "vhost"))]
mod failures;
#[cfg(feature = "fuse")]
pub mod fuse;
#[cfg(any(feature = "nbd", feature = "fuse", feature = "ublk", feature = "vhost"))]
// Some of its methods have one of these users only.
#[cfg_attr(not(all(feature = "nbd", feature = "vhost")), allow(dead_code))]
mod io_thread;
#[cfg(any(feature = "nbd", feature = "fuse"))]
mod lent;
#[cfg(any(feature = "ublk", feature = "vhost"))]
mod local_disk;
#[cfg(feature = "nbd")]
pub mod nbd;
#[cfg(any(feature = "nbd", feature = "fuse", feature = "ublk", feature = "vhost"))]
mod queue_server;
#[cfg(any(feature = "nbd", feature = "fuse", feature = "ublk", feature = "vhost"))]
mod tasks;
#[cfg(feature = "ublk")]
pub mod ublk;
#[cfg(any(feature = "nbd", feature = "fuse"))]
mod vectors;
#[cfg(feature = "vhost")]
pub mod vhost;

#[cfg(any(feature = "nbd", feature = "fuse", feature = "ublk", feature = "vhost"))]
pub use queue_server::{QueueServer, QueueServerJob, QueueThreads};

#[cfg(all(doctest, feature = "nbd"))]
#[doc = include_str!("../README.md")]
mod readme {}
