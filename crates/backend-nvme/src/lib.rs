//! A namespace of an NVMe controller as a disk for another controller: what a guest sees is
//! virtual, and its blocks are those of an SSD that the driver owns.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`NvmeDisk`] | the namespace as a disk: opening it, its properties |
//! | `queue` | a worker's queue on it: a queue pair of its own |
//! | `task` | a request as commands, and what their statuses mean |
//! | `shared` | what all queues of a disk share |
//! | `dma_share` | the guest's memory, as far as the SSD reaches it itself |
//! | `kept` | the disk of a process that has died, in the next one |
//! | `hang_up` | detects that the SSD has gone while nothing completes |
//! | `transfers` | how many commands moved data in place, and how many copied |
//!
//! # Data in place
//!
//! Where the SSD can reach the guest's memory it does, and nothing is copied: the memory is shared
//! with it (VFIO: mapped in its IOMMU) when a request first names it, for as long as the guest has
//! it. What is scattered so that it would take many commands, or lies at addresses that a command
//! can not name, goes through a buffer of the queue's, and so does everything if the SSD can not
//! have the memory.
//!
//! # Errors
//!
//! What the SSD says of a command, its status, is what the guest gets for its own
//! ([`DiskError::Device`](shadowbell_backend::DiskError::Device)). When the SSD goes away,
//! everything fails from then on with `ENODEV`.
//!
//! # What it does not implement
//!
//! Ending a command early: an Abort of the guest's takes requests back that wait, and waits for
//! those that the SSD has.
//!
//! A worker waits for the SSD's admin queue: when it opens or closes its queue pair, and while the
//! driver takes its [recovery steps](shadowbell_driver::recovery) for a late command. An SSD that
//! does not answer there holds up the other controllers of that worker for as long, ten seconds for
//! each command. Who serves disks of SSDs that may hang has to give their controllers a thread each
//! (`shadowbell serve` does).
#![forbid(unsafe_code)]

mod disk;
mod dma_share;
mod hang_up;
mod kept;
mod queue;
mod shared;
mod task;
mod transfers;

pub use disk::{NvmeDisk, OpenError, Options};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
