//! Storage behind an NVMe namespace: the [`Disk`] and [`Queue`] traits, requests, and code that all
//! disks share. The disks themselves are in other crates.
//!
//! A [`Disk`] is opened once and shared. Each I/O thread that accesses the disk opens a [`Queue`]
//! of its own, and no other thread uses this queue. A queue works in batches: any number of calls
//! of [`submit`](Queue::submit), one call of [`commit`](Queue::commit), then calls of
//! [`reap`](Queue::reap) for the completions. Between batches, the thread can wait on a file
//! descriptor. Disks in memory complete requests inline in `submit`, without `commit` and `reap`.
//!
//! * [`CompletionQueue`] is for disks whose requests end on other threads;
//! * [`Tasks`] is a table of requests for disks that execute a request in several calls;
//! * [`DiskOptions`] are the options of a disk specification;
//! * [`Orphans`] are cancelled writes that are still in flight, for disks that release writes
//!   before their end;
//! * [`Metadata`] and [`Zones`] belong to disks with metadata and to zoned disks.
#![forbid(unsafe_code)]

mod bounds;
mod checkpoint_error;
mod compare;
mod completion_queue;
mod disk;
mod error;
mod extent;
mod format;
mod index_lists;
mod info;
mod merged_fd;
mod metadata;
mod options;
mod orphans;
mod request;
mod request_table;
mod resize;
mod size;
mod stopped;
mod zoned;

pub use bounds::Bounds;
pub use checkpoint_error::CheckpointError;
pub use compare::compare;
pub use completion_queue::CompletionQueue;
pub use disk::{Disk, Queue, Wait, WaitReason, submit_any};
pub use error::{MAX_MEMORY, OpenError};
pub use extent::{Extent, ReportExtent};
pub use format::ImageFormat;
pub use index_lists::Lists;
pub use info::DiskInfo;
pub use merged_fd::merge;
pub use metadata::{Metadata, MetadataBuffer, MetadataFormat};
pub use options::DiskOptions;
pub use orphans::{Orphan, Orphans};
pub use request::{DiskError, Op, Request, Submitted};
pub use request_table::{NotIndexed, TagIndex, Tasks};
pub use resize::{ResizeError, SizeChanges, notify_resize};
pub use size::{format_size, parse_size};
pub use stopped::Stopped;
pub use zoned::{ZoneFormat, ZoneReport, Zones};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
