//! Exports of a block device to other programs, on the user-space NVMe driver.
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`nbd`] | NBD server: QEMU, libnbd's tools, fio, the kernel's NBD client |
//! | [`fuse`] | the disk as a file, and through a loop device as a block device |
//! | [`vhost`] | vhost-user-blk device (virtio-blk): QEMU, Cloud Hypervisor |
//! | [`ublk`] | block device of this machine, through the kernel's `ublk_drv` |
//! | `io_thread` | event loop of a thread that serves requests and drives its queue |
//! | `tasks` | requests in flight, as futures in numbered slots of their thread |
//! | `lent`, `depth` | choice of the thread that serves a client, by the client's queue depth |
//! | `data`, `vectors` | buffers for the data of requests, and their `iovec`s |
//! | `queue_server` | interface to an I/O thread that serves the disk's queues and a client |
//! | `local_disk` | disk of this process, which an export may access directly |
//! | `failures` | counter of requests that failed because of the disk |
//!
//! Every kind of export has its own threads, each of which uses one of the disk's queues.
//! Requests of clients are validated before they reach the disk, and errors of the disk are
//! translated to those of the protocol.
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
// Some methods are used by one of the features only.
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
