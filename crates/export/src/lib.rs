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
//! | `seat` | a thread's seat at the disk: it drives the queue that its requests go through |
//! | `tasks` | requests under way, as futures in numbered places of the thread that serves them |
//!
//! Every way to export has threads of its own, each of which uses one of the disk's queues. What
//! comes from outside is checked before it gets anywhere near the disk; what the disk says comes
//! back as the error that the protocol names.
#![deny(unsafe_code)]

pub mod fuse;
pub mod nbd;
mod seat;
mod tasks;
pub mod ublk;
pub mod vhost;
