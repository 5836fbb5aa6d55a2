//! File-backed disk: a raw image, a block device or an NVMe generic character device, through
//! io_uring or, without it, threads.
//!
//! # Architecture
//!
//! [`FileDisk::open`] probes the file and the features of its file system once, so that requests
//! need no probing. Each thread has one io_uring, which its [`Queue`](shadowbell_disk::Queue)s
//! share; without io_uring, each queue has threads. `submit` prepares requests, one system call per
//! batch passes them to the kernel, and completions are read from shared memory. A request is a
//! small state machine ([`task`]) of one or more calls; short transfers are continued, interrupted
//! calls repeated. Threads of the queue make calls that would block in the kernel: buffered writes
//! on most file systems, zeroing, and all calls on a file system without non-blocking I/O. The
//! kernel's own worker threads are not used for these calls, because the files of a thread share
//! them, and a single hung image would block all others. The ring owns the memory of a request
//! until the kernel no longer accesses it ([`crate::sys`]).
//!
//! With direct I/O, the addresses or lengths of the data may not have the alignment that the device
//! requires. Data without this alignment are copied through an aligned bounce buffer, in parts of
//! at most the buffer's size. Compare and Verify use bounce buffers too.
//!
//! Requests to an NVMe generic character device ([`namespace`]) take the same path, but the calls
//! are NVMe commands, and Identify data describe the features.
//!
//! # Truncated images
//!
//! A read beyond the end of a truncated image fails with `DiskError::OutOfRange`; it never returns
//! zeroes. After a read or a flush has detected the new end, all queues refuse access beyond it
//! until the disk is opened again, even if the file grows back, because its old content is lost. A
//! write beyond the new end, before that detection, extends the file again. Then the truncation is
//! not detected: the lost bytes are a hole and read as zeroes.
//!
//! # Failed write-back
//!
//! Through the page cache, a completed write may still fail. The kernel reports the failure only to
//! the next sync, and drops the data. Concurrent and later syncs succeed, so a host that repeats
//! its flush would believe that its data are durable. Therefore all syncs of a disk are serialized
//! ([`flusher`]). After a failed sync, all further syncs fail until the disk is opened again; a
//! controller reset does not change that, because it cannot restore the data. A FUA write through
//! the page cache is a write followed by a sync, so it fails too. With direct I/O, the kernel holds
//! no data that it could drop, so a later sync may succeed.
//!
//! # Atomic blocks
//!
//! The page cache does not read and write blocks atomically. Neither does a device whose sectors
//! are smaller than a block. In these cases, this module serializes overlapping requests of all
//! queues ([`ranges`]).
//!
//! # Loss of power
//!
//! A block that is being written during a loss of power keeps its old or its new content: the
//! storage guarantees that, or the write requests it from the storage ([`write_atomicity`]). If
//! neither is possible, a warning is logged when the disk is opened.
//!
//! # Limitation
//!
//! Verify reads through the page cache if the disk uses the page cache; it reaches the storage only
//! with direct I/O.

mod bytes;
mod device;
mod disk;
mod flusher;
mod image;
mod namespace;
mod open;
mod opener;
mod options;
mod queue;
mod ranges;
mod raw;
mod recovery;
mod shared;
mod task;
#[cfg(feature = "scripted")]
mod test_script;
#[cfg(test)]
mod tests;
mod write_atomicity;

pub use bytes::{BytesLock, BytesLocks, BytesQueue, ImageBytes};
pub use disk::FileDisk;
pub use image::{CheckedImage, ImageFile, check_image};
pub use namespace::{NamespaceFacts, identify_namespace, is_namespace};
pub use opener::{Access, OpenAttempt, Opener, open as open_image, open_images_by};
pub use options::{Aio, Direct, FileOptions, Format};
pub use raw::{RawCall, RawFile, RawStep, RawTransfer};
pub use shared::Alignment;
#[cfg(feature = "scripted")]
pub use test_script::Script;
