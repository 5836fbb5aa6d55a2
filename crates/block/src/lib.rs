//! Block device with byte granularity on the queues of a disk.
//!
//! # Architecture
//!
//! | module | contents |
//! |---|---|
//! | [`BlockDevice`] | a disk as a block device, shared by all threads |
//! | [`BlockQueue`] | a thread's queue, with futures for any executor of that thread |
//! | [`block_on`] | blocking execution, for threads that only wait for their request |
//! | `engine` | requests in flight on a queue, including those whose futures were dropped |
//! | `in_flight` | future of one request, with retries |
//! | `operations` | read, write, write zeroes, discard, flush; partial blocks |
//! | `copy` | copy, by reading and writing |
//! | `extents` | allocation status |
//! | `stream` | splitting a range into requests, several of them in flight |
//! | `locks` | locks of written ranges, exclusive for changes of partial blocks |
//! | `buffers` | buffer pools with waiting requests |
//! | `range` | splitting a byte range into whole and partial blocks |
//!
//! ```
//! use shadowbell_disk_file::MemDisk;
//! use shadowbell_block::{BlockDevice, BlockOptions};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = Arc::new(MemDisk::new(2048, 512)?);
//! let device = BlockDevice::new(disk, &BlockOptions::default())?;
//! let queue = device.queue()?;
//! queue.block_on(async {
//!     queue.write(1000, b"any bytes, anywhere", false).await?;
//!     let mut back = [0; 19];
//!     queue.read(1000, &mut back).await?;
//!     queue.flush().await
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # Order
//!
//! Overlapping requests that are in flight at the same time are executed in any order, as on every
//! disk. A program that needs an order waits for the first request before it starts the second. A
//! write of a partial block does not undo concurrent writes to the same block: the block is locked
//! exclusively while it is read, modified and written. A flush makes all writes durable that had
//! completed on any queue before the flush started.
//!
//! If all buffers are in use, requests wait in FIFO order.
//!
//! # Dropping a future
//!
//! A future can be dropped at any time. Its requests in flight are still executed, and a range that
//! they write remains locked against changes of partial blocks until they complete.
//!
//! # Timeouts
//!
//! A request that takes longer than [`BlockOptions::timeout`] is cancelled. If the disk does not
//! complete the request soon after the cancellation, the future returns [`BlockError::TimedOut`].
//! The range of the request remains locked until the disk completes the request. The future of a
//! request with memory of the caller ([`BlockQueue::read_to`]) always waits for the disk. The
//! timeout does not apply while the disk [holds](BlockQueue::holds_requests) requests after an
//! error of its storage.
//!
//! # Not implemented
//!
//! Zoned disks, reservations.
#![forbid(unsafe_code)]

mod buffers;
mod copy;
mod device;
mod engine;
mod error;
mod extents;
mod geometry;
mod in_flight;
mod locks;
mod operations;
mod options;
mod queue;
mod range;
mod shared;
mod stream;
mod threads;
mod traffic;
mod waiting;

pub use buffers::{Buffer, BufferPool};
pub use device::BlockDevice;
pub use engine::unfinished_queues;
pub use error::{BlockError, OpenError};
pub use extents::Extent;
pub use geometry::Geometry;
pub use operations::Zeroes;
pub use options::BlockOptions;
pub use queue::BlockQueue;
pub use threads::QueueThread;
pub use traffic::Traffic;
pub use waiting::block_on;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
