//! Namespace of an NVMe SSD as a disk: the guest uses a virtual controller, and the user-space
//! driver stores the guest's blocks on the SSD.
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
//! | `recovery` | crash recovery |
//! | `disconnect` | detection of a removed or disconnected SSD |
//! | `transfer_stats` | counters of zero-copy and copied transfers |
//!
//! # Zero-copy
//!
//! Zero-copy requires that the SSD can access guest memory. The memory is shared with the SSD when
//! a request first uses it, and stays shared until it is removed from the guest. With VFIO, sharing
//! means a mapping in the IOMMU domain of the SSD. Data are copied through a buffer of the queue if
//! they are scattered over many memory segments, if they are not aligned as an NVMe data pointer
//! requires, or if the memory cannot be shared.
//!
//! # Errors
//!
//! The guest's command completes with the status of the SSD's command
//! ([`DiskError::Device`](shadowbell_disk::DiskError::Device)). After the SSD was removed or
//! disconnected, all requests fail with `ENODEV`.
//!
//! # Limitations
//!
//! An Abort of the guest does not abort commands at the SSD. It cancels requests that wait in the
//! queue; requests that were submitted to the SSD complete normally.
//!
//! An I/O thread blocks on the SSD's admin queue when it opens or closes its queue pair, and while
//! the driver takes its [recovery steps](shadowbell_driver::recovery) for a late command. A hung
//! SSD then blocks the other controllers of that I/O thread, up to ten seconds per command. So each
//! controller on an SSD should have an I/O thread of its own (`shadowbell serve` does that).
#![forbid(unsafe_code)]

mod disconnect;
mod disk;
mod dma_share;
mod queue;
mod recovery;
mod shared;
mod task;
mod transfer_stats;

pub use disk::{NvmeDisk, OpenError, Options};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
