//! Namespace of an NVMe SSD as a disk: the guest sees a virtual controller, and its blocks are
//! those of an SSD that the user-space driver owns.
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`NvmeDisk`] | the namespace as a disk: opening it, its properties |
//! | `queue` | queue of an I/O thread, with a queue pair of its own |
//! | `task` | a request as NVMe commands, and the meaning of their statuses |
//! | `shared` | state shared by all queues of a disk |
//! | `dma_share` | guest memory that the SSD accesses directly |
//! | `kept` | crash recovery |
//! | `disconnect` | detection of a removed or disconnected SSD |
//! | `transfer_stats` | counters of zero-copy and copied transfers |
//!
//! # Zero-copy
//!
//! Where the SSD can access guest memory, no data are copied: the memory is shared with the SSD
//! (VFIO: mapped in its IOMMU domain) when a request first uses it, for as long as the guest has
//! it. Data that are scattered over many pieces, or not aligned as an NVMe data pointer requires,
//! go through a buffer of the queue, and so do all data if the memory cannot be shared.
//!
//! # Errors
//!
//! The guest's command completes with the status of the SSD's command
//! ([`DiskError::Device`](shadowbell_disk::DiskError::Device)). After the SSD was removed or
//! disconnected, all requests fail with `ENODEV`.
//!
//! # Limitations
//!
//! Commands at the SSD are not aborted: an Abort of the guest cancels requests that wait in the
//! queue, and waits for those that the SSD has.
//!
//! An I/O thread blocks on the SSD's admin queue when it opens or closes its queue pair, and while
//! the driver takes its [recovery steps](shadowbell_driver::recovery) for a late command. A hung
//! SSD then blocks the other controllers of that I/O thread, up to ten seconds per command.
//! Controllers on SSDs that may hang should have a thread each (`shadowbell serve` does that).
#![forbid(unsafe_code)]

mod disconnect;
mod disk;
mod dma_share;
mod kept;
mod queue;
mod shared;
mod task;
mod transfer_stats;

pub use disk::{NvmeDisk, OpenError, Options};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
