//! Block device with byte granularity on the driver's queue pairs.
//!
//! # Architecture
//!
//! | module | contents |
//! |---|---|
//! | [`BlockDevice`] | a namespace as a disk, with futures for any executor |
//! | [`Blocking`], [`block_on`] | blocking API, for threads that only wait for their request |
//! | `operations` | read, write, compare, write zeroes, discard, flush; partial blocks |
//! | `copy` | copy, by the controller's Copy command where possible |
//! | `direct` | zero-copy I/O of whole blocks with buffers of the caller |
//! | `extents`, `status` | allocation status |
//! | `stream` | splitting a range into commands, several of them in flight |
//! | `shared` | state that all handles of a disk share |
//! | `in_flight` | commands in flight, including those whose futures were dropped |
//! | `locks` | locks of written ranges: a partial block is changed exclusively |
//! | `buffers` | buffer pool with waiting requests |
//! | `range` | splitting a byte range into whole and partial blocks |
//!
//! ```no_run
//! use shadowbell_block::{BlockDevice, BlockOptions, block_on};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # fn attach() -> shadowbell_driver::Controller { unreachable!() }
//! # let mut controller = attach();
//! let disk = BlockDevice::open(&mut controller, 1, &BlockOptions::default())?;
//! block_on(async {
//!     disk.write(1000, b"any bytes, anywhere", false).await?;
//!     let mut back = [0; 19];
//!     disk.read(1000, &mut back).await?;
//!     disk.flush().await
//! })?;
//! drop(disk);
//! controller.detach()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Order
//!
//! Overlapping requests that are in flight at the same time are executed in any order, as on every
//! disk. A program that needs an order waits for the first request before it starts the second. A
//! write of a partial block does not undo concurrent writes to the same block: the block is locked
//! exclusively while it is read, modified and written. A flush makes durable what was completed
//! before the flush was started, through any queue.
//!
//! If all buffers or queue slots are in use, requests wait in FIFO order.
//!
//! # Dropping a future
//!
//! A future can be dropped at any time. Its commands in flight are still executed, and a range that
//! they write remains locked against changes of partial blocks until they complete.
//!
//! # Not implemented
//!
//! Reservations.
#![forbid(unsafe_code)]

mod blocking;
mod buffers;
mod copy;
mod device;
mod direct;
mod error;
mod extents;
mod geometry;
mod in_flight;
mod locks;
mod operations;
mod options;
mod range;
mod shared;
mod status;
mod stream;

pub use blocking::{Blocking, block_on, block_on_for};
pub use device::BlockDevice;
pub use error::{BlockError, OpenError};
pub use extents::Extent;
pub use geometry::Geometry;
pub use operations::Zeroes;
pub use options::BlockOptions;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
