//! qcow2 image as a disk: clusters are allocated when they are first written, in a growing file.
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`Qcow2Disk`] | the image as a disk: its properties |
//! | [`create`] | creation of images |
//! | `open` | opening an image and its backing files |
//! | `header` | parser and checks of the header |
//! | `queue` | queue of an I/O thread, and the buffers of its requests |
//! | `map` | locations of clusters that the fast path may access |
//! | `map_fill` | additions to the map |
//! | `fast_path` | fast path: requests on mapped clusters by io_uring |
//! | `overlap_check` | detection of clusters with two uses |
//! | `pool` | threads of the slow path, shared by all queues of a disk |
//! | `image` | slow path: requests as calls of `imago`, which implements the format |
//! | `storage`, `sys` | the image's file as storage of `imago` |
//! | `kept` | crash recovery |
//! | `repair` | repair of reference counts after a crash |
//!
//! The crate `imago` implements the format: look-up and allocation of clusters, copy-on-write, and
//! reference counts. It is thread-safe, and written by an author of QEMU's block layer. Its calls
//! block on the storage, so they run on at most [`MAX_THREADS`] threads of the disk. This is the
//! slow path. I/O threads never block on it.
//!
//! Clusters that are allocated, and neither compressed nor shared, can be read and overwritten
//! without the format. A map contains their locations, and all queues read the map without a lock.
//! The io_uring of a queue executes requests on mapped clusters directly on guest memory, as in
//! `shadowbell-disk-file`. This is the fast path. Before a cluster moves to another location, it is
//! closed: no request enters it any more, and the requests in flight there end first.
//!
//! On the slow path, data are in buffers of the queue, so the threads never access guest memory.
//! Data to write are copied when a request starts, and data that were read are copied when the
//! request is reaped. So a cancelled read ends at once, even on slow storage. A started write
//! cannot be cancelled, because it must not reach the disk after its completion was reported to the
//! host.
//!
//! # Durability
//!
//! A flush writes the tables that `imago` caches, and then syncs the file. One flush runs at a
//! time, and flushes that are submitted meanwhile share the next one. Without a flush, tables are
//! written within [`WRITE_BACK`]: a killed process loses at most the changes of that time, unless
//! it has checkpoints. While tables are written, no other request is executed. Otherwise, a written
//! table could refer to a cluster whose count is not written yet.
//!
//! The order of writes keeps the image consistent, with two exceptions: leaked clusters, which are
//! counted and unused (`qemu-img check -r leaks` frees them); and new L2 tables, which are
//! referenced for a moment before they are counted. So when an image is opened for writing, all
//! referenced clusters are checked, and counted if they are not counted yet (`repair`). That reads
//! 1/8192 of the data in the image. `imago` does not sync between tables that depend on each other.
//! So after a loss of power, tables may refer to clusters beyond the end of the file. The file is
//! then extended. Flushed data are not affected.
//!
//! An image with [checkpoints](shadowbell_disk::Disk::keep) loses nothing if its process is killed:
//! a write that has allocated clusters completes only after the tables are written. Requests that
//! end at the same time share that write of the tables. Overwrites do not wait.
//!
//! Data that the page cache has lost remain lost, as in `shadowbell-disk-file`: flushes fail until
//! the image is opened again. If another process truncates the file, all requests fail as soon as
//! that is detected, which is before a write or after a read.
//!
//! # Trust
//!
//! Images are untrusted. The header is checked before `imago` reads it. An image cannot open other
//! files: data files are refused, and backing files are refused unless allowed. Backing files are
//! opened read-only and with the format that the image states, independently of their content. An
//! image that refers to its own tables as data is not opened for writing, and one that refers to a
//! cluster twice is not written on the fast path. A panic in `imago` counts as an error of the
//! disk. All later requests fail.
#![deny(unsafe_code)]

mod create;
mod disk;
mod error;
mod fast_path;
mod header;
mod image;
mod kept;
mod map;
mod map_fill;
mod open;
mod overlap_check;
mod pool;
mod queue;
mod repair;
mod storage;
// Contains trait methods that are `unsafe` to call. Their bodies contain no unsafe operation.
#[allow(unsafe_code)]
mod sys;

pub use create::create;
pub use disk::Qcow2Disk;
pub use error::OpenError;
pub use pool::{MAX_THREADS, WRITE_BACK};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
