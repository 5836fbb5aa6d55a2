//! What an NVMe namespace keeps its bytes in.
//!
//! A [`Disk`] is opened once and shared; each worker thread that serves a queue on it opens a
//! [`Queue`] of its own, which is used by that thread alone. A queue is a trait of batches: any
//! number of [`submit`](Queue::submit), one [`commit`](Queue::commit), then
//! [`reap`](Queue::reap) whatever is done, with a descriptor to sleep on. Disks that are memory
//! complete inline, and pay for none of it.
//!
//! * [`NullDisk`] keeps nothing: what is measured on it is everything but the disk;
//! * [`MemDisk`] keeps its blocks in memory, for as long as the process lives;
//! * [`FileDisk`] is a raw image, a block device or an NVMe namespace by its character device,
//!   through io_uring or threads;
//! * [`LimitedDisk`] is any of them with limits of what a second may bring;
//! * [`MetadataDisk`] is any of them with metadata and protection information;
//! * [`ZonedDisk`] is memory or a raw image made of zones;
//! * [`open`] opens any of them by what a person writes: `disk.img`, `mem:1GiB`, `null:1TiB`.
#![deny(unsafe_code)]

mod bounds;
mod compare;
mod disk;
mod either_fd;
mod error;
mod extent;
mod file;
mod format;
mod hand_over;
mod info;
mod limit;
mod lists;
mod mem;
mod metadata;
mod new_size;
mod null;
mod regions;
mod request;
mod resize;
mod size;
#[allow(unsafe_code)]
mod sys;
mod tasks;
mod uri;
mod zoned;

pub use bounds::Bounds;
pub use compare::compare;
pub use disk::{Disk, Queue};
pub use error::{MAX_MEMORY, OpenError};
pub use extent::{Extent, Tell};
#[cfg(feature = "scripted")]
#[doc(hidden)]
pub use file::Script;
pub use file::{Access, BytesQueue, ImageBytes, Opener, open_image, open_images_by};
pub use file::{Aio, Alignment, Direct, FileDisk, FileOptions, Format, ImageFile, Wait};
pub use file::{NamespaceFacts, identify_namespace, is_namespace};
pub use file::{RawCall, RawFile, RawStep, RawTransfer};
pub use format::ImageFormat;
pub use hand_over::HandOverError;
pub use info::DiskInfo;
pub use limit::{Clock, LimitedDisk, Limiter, Limits, Rate};
pub use lists::Lists;
pub use mem::MemDisk;
pub use metadata::{Metadata, MetadataBuffer, MetadataDisk, MetadataFormat};
pub use new_size::{SizeNews, tell_new_size};
pub use null::NullDisk;
pub use request::{DiskError, Op, Request, Submitted};
pub use resize::ResizeError;
pub use size::parse_size;
#[cfg(feature = "scripted")]
#[doc(hidden)]
pub use sys::End;
pub use sys::{fence, unpin};
pub use tasks::Tasks;
pub use uri::{FileSpec, adopt, open, open_lasting, recover};
pub use zoned::{ZoneFormat, ZoneReport, ZonedDisk, Zones};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
