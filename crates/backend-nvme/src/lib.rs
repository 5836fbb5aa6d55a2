//! A namespace of an NVMe controller as a disk for another controller: what a guest sees is virtual,
//! and its blocks are those of an SSD that the driver owns.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`NvmeDisk`] | the controller that the driver owns, and the namespace of it |
//! | `queue` | a worker's way there: a queue pair of its own |
//! | `task` | a request as commands, and what their statuses mean |
//! | `watch` | who hears that the SSD has gone, while nothing completes |
//! | `lent` | the guest's memory, as far as the SSD may reach it by itself |
//! | `counts` | which way the data went |
//!
//! # The way of the data
//!
//! Where the SSD can reach the guest's memory it does, and nobody copies: the memory is shared with
//! it (VFIO: mapped in its IOMMU) when a request first names it, for as long as the guest has it.
//! What is scattered so that it would take many commands, or lies at addresses that a command can
//! not name, goes through a buffer of the queue's, and so does everything if the SSD can not have
//! the memory.
//!
//! # Errors
//!
//! What the SSD says of a command, its status, is what the guest gets for its own
//! ([`DiskError::Device`](shadowbell_backend::DiskError::Device)). When the SSD goes away, everything fails from
//! then on with `ENODEV`.
//!
//! # What it does not implement
//!
//! Ending a command early: an Abort of the guest's takes requests back that wait, and waits for
//! those that the SSD has.
//!
//! A worker waits for the SSD's admin queue: when it opens or closes its queue pair, and while a
//! command that is late climbs the driver's [ladder](shadowbell_driver::recovery). An SSD that does not answer
//! there (a vfio-user server that is stopped) holds up the other controllers of that worker for as
//! long, ten seconds for each command. Who serves disks of SSDs that may hang had best give each a
//! process of its own.
#![forbid(unsafe_code)]

mod counts;
mod device;
mod lent;
mod queue;
mod task;
mod watch;

pub use device::{NvmeDisk, OpenError, Options};
