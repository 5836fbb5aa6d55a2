//! A block device on the driver's queue pairs: any bytes, of any length.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`BlockDevice`] | a namespace as a disk, with futures for any executor |
//! | [`Blocking`], [`block_on`] | a disk for a thread that has nothing else to do meanwhile |
//! | `operations` | read, write, compare, write zeroes, discard, flush; parts of blocks |
//! | `copy` | bytes from one place of the disk to another, by the controller where it can |
//! | `direct` | whole blocks to and from buffers of the caller's own, without a copy |
//! | `extents`, `status` | which bytes are allocated |
//! | `stream` | a range of blocks as commands: split, with several of them in flight |
//! | `shared` | what all handles on a disk share |
//! | `in_flight` | commands in flight, also those whose futures were dropped |
//! | `locks` | which ranges are being written: a change of part of a block has it to itself |
//! | `buffers` | the buffers that requests take turns with |
//! | `range` | a range of bytes as whole blocks and parts of blocks |
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
//! Requests that overlap and are under way at the same time happen in any order, as on every disk;
//! a program that needs an order waits for the first before it makes the second. What a request
//! that does not cover whole blocks must not do is undo others: it has its blocks to itself while
//! it reads, modifies and writes them. A flush makes durable what was completed before it began,
//! through whichever queue.
//!
//! More requests than there are buffers or places in the queue wait, first come, first served.
//!
//! # Dropping a future
//!
//! is safe at any time. What was under way then still happens, and a range that it writes stays
//! locked against those who modify parts of blocks until it has.
//!
//! # What it does not implement
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
