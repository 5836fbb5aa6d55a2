//! A qcow2 image as a disk: clusters that are allocated when they are first written, in a file that
//! grows.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`Qcow2Disk`] | the image as a disk: its properties |
//! | [`create`] | a new image |
//! | `open` | opening an image and what it is the difference to |
//! | `header` | what an image says of itself, checked before anything else is read of it |
//! | `queue` | a worker's queue on it, and the buffers of its requests |
//! | `map` | where the clusters are that need nothing of the format |
//! | `learn` | how it comes to know them |
//! | `fast` | a queue's requests on those |
//! | `claims` | whether each cluster of a file has one use |
//! | `pool` | the threads that carry requests out, which all queues of a disk share |
//! | `image` | a request as calls of the crate `imago`, which knows the format |
//! | `storage`, `sys` | the image's file, as that crate reads and writes it |
//! | `completions` | what the threads hand back to a queue |
//! | `kept` | the image of a process that has died, in the next one |
//! | `mend` | counts of clusters that a death has left wrong |
//!
//! The format's work (looking clusters up, allocating them, copying what a write leaves of one,
//! counting references) is the crate `imago`'s: it is by one of the authors of QEMU's block layer,
//! and may be used from many threads at once. It waits for the storage where it has to, so it runs
//! on threads of the disk's own, at most [`MAX_THREADS`]. No thread that serves queues waits for
//! it.
//!
//! Clusters that are allocated, and neither compressed nor shared, need nothing of that to be read
//! or overwritten. Where they are is in a map that all queues read without a lock, and a request on
//! them goes from the host's memory to the file by the queue's own io_uring, as those of
//! `shadowbell-backend` do. Whoever moves a cluster closes it first, and waits for who is at work
//! there.
//!
//! On the long way, a request's data are in a buffer of the queue's: threads never see the guest's
//! memory. What is to be written is copied when the request begins, and what was read when it is
//! reaped. So a read that is cancelled ends at once, however long the storage takes. A write that
//! has begun ends as it would have: it must not reach the disk after the host was told that it is
//! over.
//!
//! # What is durable when
//!
//! A flush writes what the crate keeps of tables, and then has the system write everything. One is
//! under way at a time, and those who ask meanwhile share the next. Without a flush, tables are
//! written within [`WRITE_BACK`]: so long is what a process that is killed may take with it, if
//! nobody goes on for it. Nothing else is read or written while tables are, so that no cluster is
//! named in them that was counted too late. The order of writes keeps the image consistent, but for
//! clusters that are counted and used by nothing (`qemu-img check -r leaks` gives them back), and
//! for a moment in which the first table of a part of the disk is named and not counted yet. So
//! whoever opens an image to write to it looks first whether what its tables name is counted, and
//! makes it good (`mend`): that reads 1/8192 of what the disk holds. The crate does not wait for the
//! storage between tables that depend on each other. So after a loss of power tables may name what
//! lies beyond the end of the file, which is made longer then; what was flushed is there.
//!
//! An image that is [kept](shadowbell_backend::Disk::keep) for the next process loses nothing with
//! its process: a write that has allocated clusters ends when the tables are written, which
//! requests that end at the same time share. What overwrites clusters waits for nothing.
//!
//! What the page cache has lost stays lost, as in `shadowbell-backend`: flushes fail until the
//! image is opened again. If the file becomes shorter under us, everything fails from the moment on
//! when that is found: before a write, and where a read ends.
//!
//! # Trust
//!
//! An image may be made by somebody else. Its header is checked before the crate sees it. It opens
//! no other file: data files are refused, and backing files unless they are allowed, which are then
//! opened read-only and by the format that the image states, never by what they hold. An image that
//! names its own tables as a part of the disk is not written, and one that names a cluster twice
//! not past the crate. A panic in the crate is an error of the disk, which does nothing more from
//! then on.
#![deny(unsafe_code)]

mod claims;
mod completions;
mod create;
mod disk;
mod error;
mod fast;
mod header;
mod image;
mod kept;
mod learn;
mod map;
mod mend;
mod open;
mod pool;
mod queue;
mod storage;
// The methods of a trait that are `unsafe` to call; they do nothing that is.
#[allow(unsafe_code)]
mod sys;

pub use create::create;
pub use disk::Qcow2Disk;
pub use error::OpenError;
pub use pool::{MAX_THREADS, WRITE_BACK};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
