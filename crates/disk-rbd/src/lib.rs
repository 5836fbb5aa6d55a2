//! RBD image of a Ceph cluster as a disk.
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`RbdSpec`] | specification of an image |
//! | [`RbdDisk`] | the image as a disk: its properties |
//! | `shared` | shared state of a disk's queues |
//! | `queue` | queue of an I/O thread |
//! | `completions` | completions of a queue, and its orphans |
//! | `sys` | librados and librbd, loaded when the first image is opened |
//! | `recovery` | crash recovery |
//! | `exit` | exit of the process while images are open |
//!
//! Ceph is required neither to build nor to install this crate: its libraries are loaded (`dlopen`)
//! when an image is opened. All calls for requests are asynchronous: the I/O thread starts them,
//! and Ceph's threads complete them. The calls use buffers of the queue and never guest memory,
//! because a call cannot be cancelled, and guest memory may be unmapped at any time. If a request
//! is cancelled, the results of its reads are ignored, and its writes become
//! [orphans](shadowbell_disk::Orphans) until Ceph completes them.
//!
//! # Durability
//!
//! Flushed data and FUA writes are durable; other data may be in librbd's cache in this process.
//! With the policy `rbd_cache_policy=writearound`, a FUA write bypasses the cache; with another
//! policy, a flush follows it. A flush also follows each Write Zeroes with FUA. If the image was
//! opened [without the cache](RbdDisk::open_recoverable), all completed writes are durable. While
//! the cluster is unreachable, requests wait in Ceph's client.
//!
//! # Full cluster
//!
//! Without the cache, a write fails with [`NoSpace`](shadowbell_disk::DiskError::NoSpace) if the
//! pool or a quota is full. Operations that need no space continue to work: reads, overwrites of
//! existing objects, discards, opening an image. With the cache, an error would come after the
//! completion of the write, and its data would be lost. So with the cache, writes wait until there
//! is space, and later flushes and the opening of an image wait too.
//!
//! # Discards
//!
//! A discard is executed as a Write Zeroes that frees objects. Ceph's own discard ignores ranges
//! that cover only a part of an object, but discarded blocks of a disk must read as zeroes.
//!
//! # Other clients of an image
//!
//! A [compare and write](shadowbell_disk::Op::CompareAndWrite) of a block is one operation on
//! its object, so it is atomic for all clients of the cluster. It requires an image whose stripe
//! unit is a multiple of the block size, as it is by default.
//!
//! Ceph reports size changes ([`Disk::take_size_change`](shadowbell_disk::Disk::take_size_change)).
#![deny(unsafe_code)]

mod completions;
mod disk;
mod error;
mod exit;
mod queue;
mod recovery;
mod shared;
#[allow(unsafe_code)]
mod sys;
mod uri;

pub use disk::RbdDisk;
pub use error::OpenError;
pub use uri::RbdSpec;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
