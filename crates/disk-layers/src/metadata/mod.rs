//! Metadata layer: adds metadata and protection information to any disk without them.
//!
//! The metadata of all blocks follow the data of all blocks, in the last part of the disk below.
//! The data thus keep their positions, one file holds everything, and features of the disk below
//! such as recovery and caches work unchanged.
//!
//! Protection information is stored inverted. Blocks that were never written or were discarded are
//! zeroes on the disk below. So their protection information reads as FFh in every byte. This value
//! disables the checks.
//!
//! A block of the disk below holds the metadata of many logical blocks, so writing the metadata of
//! one logical block is a read-modify-write. [`locks`] serializes the read-modify-writes of a
//! block. It also prevents a reader from seeing the data of one write with the metadata of another.
//!
//! A write-through [`cache`] holds recently read or written metadata. Most reads are therefore one
//! read of the disk below, and most writes are two writes.
//!
//! Data and metadata are separate writes. After a loss of power between them, a block may have the
//! data of one write and the metadata of another. A check of the guard detects that. The same
//! applies to a write that is cancelled after its start.

mod cache;
mod checks;
mod disk;
mod layout;
mod locks;
mod queue;
mod task;
#[cfg(test)]
mod tests;

pub use disk::MetadataDisk;
pub(crate) use locks::{Bell, granted};
