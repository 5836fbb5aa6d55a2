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
//!
//! Nothing of Ceph is needed to build or to install: its libraries are loaded (`dlopen`) when an
//! image is opened. All calls on the way of a request are asynchronous, and end on Ceph's threads.
//! They work on buffers of the queue's, never on the guest's memory: a call can not be taken back.
//!
//! # What is durable when
//!
//! What was flushed: Ceph's client has a cache in this process. FUA is a flush after the write.
//! Without the cluster, requests wait, as Ceph's client has it, until it is back.
//!
//! A discard is a Write Zeroes that gives objects back. Ceph's own discard leaves alone what is not
//! a whole object, and a disk's discarded blocks read as zeroes.
//!
//! # What it does not implement
//!
//! Compare and write as one step: no request of a controller's asks for it. Being told of a new
//! size: it is seen when somebody asks ([`Disk::resized`](shadowbell_backend::Disk::resized)).
#![deny(unsafe_code)]

mod completions;
mod disk;
mod error;
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
