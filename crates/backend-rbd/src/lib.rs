//! An image of a Ceph cluster (RBD) as a disk.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`RbdSpec`] | an image as people write it |
//! | [`RbdDisk`] | the image as a disk: its properties |
//! | `shared` | what the queues of a disk share |
//! | `queue` | a worker's queue on it |
//! | `sys` | librados and librbd, loaded when the first image is opened |
//! | `kept` | the image of a process that has died, in the next one |
//! | `completions` | what Ceph's threads hand back to a queue |
//! | `exit` | images that are open when the process ends |
//!
//! Nothing of Ceph is needed to build or to install: its libraries are loaded (`dlopen`) when an
//! image is opened. All calls on the way of a request are asynchronous: they are begun by the
//! queue's thread, and end on Ceph's.
//! They work on buffers of the queue's, never on the guest's memory: a call can not be taken back.
//!
//! # What is durable when
//!
//! What was flushed, or written with FUA: Ceph's client has a cache in this process. A write with
//! FUA goes by it. Zeroes are flushed after they were written, and so are writes if the cache is of
//! another kind than `rbd_cache_policy=writearound`. Opened
//! [without it](RbdDisk::open_lasting), a write that has ended is durable. Without the cluster,
//! requests wait, as Ceph's client has it, until it is back.
//!
//! # A full cluster
//!
//! Without that cache, a write for which a pool or a quota has no room ends with
//! [`NoSpace`](shadowbell_backend::DiskError::NoSpace). What needs no room goes on: reads,
//! overwrites of objects that are there, discards, opening an image. With the cache, writes were
//! answered that would be lost so. They wait, and flushes after them, and whoever opens an image.
//!
//! # Discards
//!
//! A discard is a Write Zeroes that gives objects back. Ceph's own discard leaves alone what is not
//! a whole object, and a disk's discarded blocks read as zeroes.
//!
//! # Other users of an image
//!
//! A [compare and write](shadowbell_backend::Op::CompareAndWrite) of a block is one step of the
//! object that the block is in, and so for all clients of the cluster. It takes an image whose
//! stripe unit is a multiple of the block size, as it is by default.
//!
//! Ceph tells of a new size ([`Disk::takes_new_size`](shadowbell_backend::Disk::takes_new_size)).
#![deny(unsafe_code)]

mod completions;
mod disk;
mod error;
mod exit;
mod kept;
mod queue;
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
