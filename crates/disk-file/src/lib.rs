//! Disks of this machine: raw images, block devices, NVMe character devices, memory.
//!
//! * [`FileDisk`] is a raw image, a block device or an NVMe generic character device
//!   (`/dev/ng0n1`), accessed by io_uring or by threads;
//! * [`MemDisk`] stores its blocks in memory of the process;
//! * [`NullDisk`] stores nothing, so that a benchmark measures everything except the storage;
//! * [`open`] opens a disk by its specification: `disk.img`, `mem:1GiB`, `null:1TiB`.
//!
//! [`ImageFile`] and [`ImageBytes`] are for other crates, whose disks have a format in a file.
#![deny(unsafe_code)]

mod extents;
mod file;
mod mem;
mod null;
mod regions;
#[allow(unsafe_code)]
mod sys;
mod uri;

#[cfg(feature = "scripted")]
#[doc(hidden)]
pub use file::Script;
pub use file::{Access, OpenAttempt, Opener, open_image, open_images_by};
pub use file::{Aio, Alignment, Direct, FileDisk, FileOptions, Format, ImageFile};
pub use file::{BytesLock, BytesLocks, BytesQueue, ImageBytes};
pub use file::{CheckedImage, check_image};
pub use file::{NamespaceFacts, identify_namespace, is_namespace};
pub use file::{RawCall, RawFile, RawStep, RawTransfer};
pub use mem::MemDisk;
pub use null::NullDisk;
#[cfg(feature = "scripted")]
#[doc(hidden)]
pub use sys::CallOutcome;
pub use sys::{fence, prepare as prepare_rings, unpin};
pub use uri::{
    FILE_OPTIONS, FileSpec, MEMORY_OPTIONS, NULL_OPTIONS, open, open_recoverable, recover,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
