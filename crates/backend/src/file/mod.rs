//! A disk that is a file, a block device or an NVMe namespace's character device, through io_uring
//! or, where there is none, threads.
//!
//! # Architecture
//!
//! [`FileDisk::open`] finds out what the file is and what its file system can do; nothing of that
//! is tried again under load. Each thread's [`Queue`](crate::Queue) has a ring of its own (or
//! threads of its own): requests are prepared as they are submitted, one system call a batch hands
//! them over, and completions are read from shared memory. A request is a small state machine
//! ([`task`]) that goes through one or more calls; short transfers are continued, interrupted ones
//! repeated. Calls for which the kernel would have to wait (buffered writes on most file systems,
//! zeroing, everything on a file system that has no other way) are made by threads of the queue's
//! own: those that the kernel has for them are shared by all rings of a thread, and one image that
//! does not answer would keep them from the others. The memory that the kernel works on belongs to
//! the ring until it is done with it ([`crate::sys`]).
//!
//! With direct I/O, data whose addresses or lengths the device can not take goes through an
//! aligned bounce buffer, in pieces of bounded size; so does what is only compared or verified.
//!
//! A namespace by its character device ([`namespace`]) takes the same way; only its calls are NVMe
//! commands, and what it can is asked of the device.
//!
//! # When the image changes under us
//!
//! A read beyond the end of an image that was truncated is `DiskError::OutOfRange`, never
//! zeroes. From the moment that a read or a flush finds the end moved, nothing beyond it is read
//! or written by any queue until the disk is opened again, even if the file has grown back: what
//! was there is lost. A write that comes before either makes the file longer again, as the
//! system's writes do; that can not be distinguished from a hole.
//!
//! # When the system can not write back
//!
//! Through the page cache, a write that has completed may still fail. The system reports that to
//! the next sync, once, and forgets the data: the sync after that succeeds, and so does one that is
//! under way at the same time. A host that tries again would take that for success. So all syncs of
//! a disk are one after the other ([`flusher`]), and one that has failed goes on failing until the
//! disk is opened again: no reset of a controller brings the data back. A write that is to be
//! durable by itself is a write and a sync there, and fails like one. With direct I/O nothing is
//! forgotten, and a sync that is repeated may succeed.
//!
//! # Blocks stay whole
//!
//! What the page cache does not do, and a device not for blocks of several of its sectors, is done
//! here: requests that overlap are one after the other, of all queues ([`ranges`]).
//!
//! # When the power goes
//!
//! A block is there as it was or as it was written: the storage sees to that, or the write asks for
//! it ([`atom`]). If neither is to be had, the disk says so as it is opened.
//!
//! # What it does not do
//!
//! Verify reads through the page cache if the disk uses it; only direct I/O reaches the storage.

mod atom;
mod bytes;
mod device;
mod disk;
mod flusher;
mod image;
mod kept;
mod namespace;
mod open;
mod opener;
mod options;
mod queue;
mod ranges;
mod raw;
mod saved;
#[cfg(feature = "scripted")]
mod script;
mod shared;
mod task;
#[cfg(test)]
mod tests;

pub use bytes::{BytesQueue, ImageBytes};
pub use disk::FileDisk;
pub use image::{ImageFile, Wait};
pub use namespace::{NamespaceFacts, identify_namespace, is_namespace};
pub use opener::{Access, Opener, open as open_image, open_images_by};
pub use options::{Aio, Direct, FileOptions, Format};
pub use raw::{RawCall, RawFile, RawStep, RawTransfer};
#[cfg(feature = "scripted")]
pub use script::Script;
pub use shared::Alignment;
