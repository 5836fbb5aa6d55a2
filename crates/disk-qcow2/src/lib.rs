//! qcow2 image as a disk: clusters are allocated when they are first written, in a growing file.
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`Qcow2Disk`] | the image as a disk: its properties |
//! | [`create`] | creation of images |
//! | `check` | check of an image on a thread, for which requests wait |
//! | `open` | opening an image, its data file and its backing files |
//! | `named_files` | paths of the files that an image names |
//! | `header` | parser and checks of the header |
//! | `format` | locations of clusters, and reads |
//! | `write` | allocation, copy-on-write, and zeroes |
//! | `tables` | L2 entries, and a bounded cache of tables |
//! | `refcount` | reference counts, and the order of their writes |
//! | `snapshot` | internal snapshots, which are kept |
//! | `compressed` | decompression of clusters |
//! | `repair` | reference counts of dirty images, from all references |
//! | `storage`, `sys` | files, with the page cache or direct I/O |
//! | `queue` | queue of an I/O thread, and the buffers of its requests |
//! | `map` | locations of clusters that the fast path may access |
//! | `map_fill` | additions to the map |
//! | `fast_path` | fast path: requests on mapped clusters by io_uring |
//! | `pool` | threads of the slow path, shared by all queues of a disk |
//! | `image`, `ranges` | slow path: execution of requests, and locks of their clusters |
//! | `recovery` | crash recovery |
//!
//! Accesses to the tables block on the storage, so they run on at most [`MAX_THREADS`] threads of
//! the disk. This is the slow path. I/O threads never block on it.
//!
//! Clusters that are allocated, and neither compressed nor shared, can be read and overwritten
//! without the format. A map contains their locations, and all queues read the map without a lock.
//! The io_uring of a queue executes requests on mapped clusters directly on guest memory, as in
//! `shadowbell-disk-file`. This is the fast path. Before a cluster moves to another location, it is
//! closed: no request enters it any more, and the requests in flight on it end first.
//!
//! On the slow path, data are in buffers of the queue, so the threads never access guest memory.
//! Data to write are copied when a request starts, and data that were read are copied when the
//! request is reaped. So a cancelled read ends at once, even on slow storage. A started write
//! cannot be cancelled, because it must not reach the disk after its completion was reported to the
//! host.
//!
//! # Durability
//!
//! Tables are written through: when a request completes, its data and its tables are in the file.
//! So a killed process loses nothing. A flush syncs the file. One flush runs at a time, and flushes
//! that are submitted meanwhile share the next one.
//!
//! After a loss of power, any of the writes since the last sync may be missing. The order of writes
//! (modules `write` and `refcount`) leaves a consistent image then, in version 2 and 3, except for
//! leaked clusters, which are counted and unused (`qemu-img check -r leaks` frees them). So opening
//! an image needs no check of its clusters. An image that another program has marked as dirty is
//! repaired when it is opened for writing. If that takes long, requests wait for its end.
//!
//! Data that the page cache has lost remain lost, as in `shadowbell-disk-file`: flushes fail until
//! the image is opened again. If another process truncates the file, all requests fail as soon as
//! the truncation is detected: before the next write, or after the next read.
//!
//! # Trust
//!
//! Images are untrusted. The header is checked first. An image cannot open other files: data files
//! and backing files are refused unless allowed. Backing files are opened read-only and with the
//! format that the image states, independently of their content. An image in which two tables have
//! the same location is not opened for writing. An entry that refers to a table, beyond the end of
//! the file or to an unaligned offset is damaged: requests on its cluster fail, others do not. The
//! memory for tables is bounded: a refcount table of at most 8 MiB, a cache of 16 MiB for the
//! image, another cache of 16 MiB for all backing files, and a set of the clusters with tables (at
//! most 6 Mi clusters). A panic in this crate counts as an error of the disk; all later requests
//! fail.
#![deny(unsafe_code)]

mod check;
mod compressed;
mod create;
mod disk;
mod error;
mod fast_path;
mod format;
mod header;
mod image;
mod map;
mod map_fill;
mod named_files;
mod open;
mod pool;
mod queue;
mod ranges;
mod recovery;
mod refcount;
mod repair;
mod snapshot;
mod storage;
#[allow(unsafe_code)]
mod sys;
mod tables;
#[cfg(test)]
mod tests;
mod write;

pub use create::create;
pub use disk::Qcow2Disk;
pub use error::OpenError;
pub use named_files::named_files;
pub use pool::MAX_THREADS;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
