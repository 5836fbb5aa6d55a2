//! Exports of a disk to other programs: NBD, FUSE, vhost-user-blk, ublk.
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`nbd`] | NBD server: QEMU, libnbd's tools, fio, the kernel's NBD client |
//! | [`fuse`] | the disk as a file, and through a loop device as a block device |
//! | [`vhost`] | vhost-user-blk device (virtio-blk): QEMU, Cloud Hypervisor |
//! | [`ublk`] | block device of this machine, through the kernel's `ublk_drv` |
//! | `io_thread` | event loop of a thread that serves requests, with its queue of the disk |
//! | `tasks` | requests in flight, as futures in numbered slots of their thread |
//! | `poll_window` | adaptive polling before a sleep |
//! | `data`, `vectors` | buffers for the data of requests, and their `iovec`s |
//! | `failures` | counter of requests that failed because of the disk |
//!
//! Every export serves a [`BlockDevice`](shadowbell_block::BlockDevice) on any
//! [`Disk`](shadowbell_disk::Disk). An export has threads of its own, each of which opens one of
//! the disk's queues. Requests of clients are validated before they reach the disk, and errors of
//! the disk are translated to those of the protocol.
#![deny(unsafe_code)]

#[cfg(any(feature = "nbd", feature = "fuse"))]
mod data;
#[cfg(any(feature = "nbd", feature = "fuse", feature = "ublk", feature = "vhost"))]
mod failures;
#[cfg(feature = "fuse")]
pub mod fuse;
#[cfg(any(feature = "nbd", feature = "fuse", feature = "ublk", feature = "vhost"))]
// Some methods are used only with one of the features.
#[cfg_attr(not(all(feature = "nbd", feature = "vhost")), allow(dead_code))]
mod io_thread;
#[cfg(feature = "nbd")]
pub mod nbd;
#[cfg(any(feature = "nbd", feature = "fuse", feature = "ublk", feature = "vhost"))]
// Some methods are used only with one of the features.
#[cfg_attr(not(all(feature = "nbd", feature = "vhost")), allow(dead_code))]
mod poll_window;
#[cfg(any(feature = "nbd", feature = "fuse", feature = "ublk", feature = "vhost"))]
mod tasks;
#[cfg(feature = "ublk")]
pub mod ublk;
#[cfg(any(feature = "nbd", feature = "fuse"))]
mod vectors;
#[cfg(feature = "vhost")]
pub mod vhost;

#[cfg(all(doctest, feature = "nbd"))]
#[doc = include_str!("../README.md")]
mod readme {}
