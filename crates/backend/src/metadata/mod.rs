//! Disks whose blocks have metadata, on any disk whose blocks have none.
//!
//! The metadata of all blocks lie behind the data of all blocks, one after the other, in what is
//! left of the disk below. So the data are where they would be without, everything that another
//! disk can do (hand-over, recovery, caches, limits) is its own, and one file is all there is.
//!
//! Protection information is stored inverted. What was never written or was discarded is zeroes in
//! the disk below, and reads as a logical block that is not checked: FFh in every byte of it.
//!
//! A block of the disk below has the metadata of many logical blocks. Who writes some of them reads
//! it first; [`locks`] has such requests wait for each other, and has nobody find the data of one
//! write and the metadata of another.
//!
//! What was read or written of the metadata last is kept ([`cache`]), and is in the disk below,
//! too. So most reads are one read of the disk below, and most writes two writes.
//!
//! Data and metadata are two writes. If the machine loses its power in between, a block may have
//! the data of one write and the metadata of another, and a check finds that. The same goes for a
//! write that was cancelled when it had begun.

mod cache;
mod checks;
mod disk;
mod format;
mod layout;
mod locks;
mod queue;
mod task;
#[cfg(test)]
mod tests;

pub use checks::{Metadata, MetadataBuffer};
pub use disk::MetadataDisk;
pub use format::MetadataFormat;
pub(crate) use locks::Bell;
