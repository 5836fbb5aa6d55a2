//! Storage behind an NVMe namespace: the [`Disk`] and [`Queue`] traits and their implementations.
//!
//! A [`Disk`] is opened once and shared. Each I/O thread that serves a queue on the disk opens a
//! [`Queue`] of its own, which only that thread uses. A queue works in batches: any number of
//! [`submit`](Queue::submit), one [`commit`](Queue::commit), then [`reap`](Queue::reap) of the
//! completions, with a file descriptor to sleep on. Disks in memory complete requests inline in
//! `submit` and need none of the rest.
//!
//! * [`NullDisk`] stores nothing: a benchmark on it measures everything but the storage;
//! * [`MemDisk`] stores its blocks in memory of the process;
//! * [`FileDisk`] is a raw image, a block device or an NVMe generic character device
//!   (`/dev/ng0n1`), accessed by io_uring or by threads;
//! * [`LimitedDisk`] adds rate limits to any disk;
//! * [`MetadataDisk`] adds metadata and protection information to any disk;
//! * [`ZonedDisk`] is a zoned disk (ZNS) in memory or in a raw image;
//! * [`CompletionQueue`] is for disks of other crates whose requests end on other threads;
//! * [`open`] opens a disk by its specification: `disk.img`, `mem:1GiB`, `null:1TiB`.
#![deny(unsafe_code)]

mod bounds;
mod checkpoint_error;
mod compare;
mod completion_queue;
mod disk;
mod error;
mod extent;
mod file;
mod format;
mod index_lists;
mod info;
mod limit;
mod mem;
mod merged_fd;
mod metadata;
mod null;
mod regions;
mod request;
mod request_table;
mod resize;
mod size;
#[allow(unsafe_code)]
mod sys;
mod uri;
mod zoned;

pub use bounds::Bounds;
pub use checkpoint_error::CheckpointError;
pub use compare::compare;
pub use completion_queue::CompletionQueue;
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
pub use index_lists::Lists;
pub use info::DiskInfo;
pub use limit::{Clock, LimitedDisk, Limiter, Limits, Rate};
pub use mem::MemDisk;
pub use metadata::{Metadata, MetadataBuffer, MetadataDisk, MetadataFormat};
pub use null::NullDisk;
pub use request::{DiskError, Op, Request, Submitted};
pub use request_table::Tasks;
pub use resize::{ResizeError, SizeNews, tell_new_size};
pub use size::parse_size;
#[cfg(feature = "scripted")]
#[doc(hidden)]
pub use sys::End;
pub use sys::{fence, unpin};
pub use uri::{FileSpec, open, open_lasting, recover};
pub use zoned::{ZoneFormat, ZoneReport, ZonedDisk, Zones};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
