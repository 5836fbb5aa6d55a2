//! Shared memory that a peer can read and change at any time.
//!
//! A controller works on memory that it does not own: the guest's queues, its PRP lists, its data
//! pages. The guest, the VMM or another program may change every byte at any moment, unmap it, or
//! truncate the file behind it. This crate makes that memory safe to use:
//!
//! * [`Mapping`] is one `mmap`, kept alive by every object that can still access it;
//! * [`SharedBytes`] is a bounds-checked window into a mapping (each read is a single copy);
//!   [`SharedU32`] is one 32-bit cell of a mapping (a doorbell, a shadow entry);
//! * [`DmaSpace`] is the control plane's map of the peer's I/O virtual addresses (IOVA),
//!   [`DmaTable`] an immutable snapshot of it, and [`View`] one thread's handle on a snapshot,
//!   which resolves addresses without a lock or an atomic operation;
//! * [`Segments`] is a command's data, resolved from PRPs ([`View::resolve_prps`]) or SGLs
//!   ([`View::resolve_sgl`]) to host memory. A `Segments` holds its view, so memory cannot be
//!   unmapped while a command that uses it is in flight. An unmap replaces the snapshot, and is
//!   complete when every view of the old snapshot is dropped ([`ViewWatch`]);
//! * [`DirtyLog`] records the written pages, for live migration;
//! * [`Ring`] is a queue's memory, entry by entry, and [`SqeBatch`] a batch of entries that is
//!   published together;
//! * [`EventFd`] wakes a sleeping thread, and [`sigbus`] turns the loss of the memory behind a
//!   mapping into a flag;
//! * [`AbortOnPanic`] guards threads on which others depend; [`process`] has functions for a
//!   process that executes another program in its place.
//!
//! This is the only crate of the workspace with `unsafe` code, besides thin `sys` modules. If a
//! peer changes memory during a copy, the copied *values* can be arbitrary, but the program's
//! behaviour stays defined: everything is copied once, and the copy is validated.

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

mod abort;
mod adaptive_poll;
mod bit_bucket;
mod copy;
mod dirty;
mod dma;
mod epoll;
mod error;
mod event;
mod eventfd_signal;
mod file_status;
mod host_ranges;
mod mapping;
mod notifier;
pub mod page_tables;
pub mod process;
pub mod processors;
mod prp;
mod reclaim;
mod ring;
mod segments;
mod sgl;
mod shared;
pub mod sigbus;
pub mod sigsys;
mod sqe_batch;
mod thread_usage;
mod trim;
mod view_change;
mod yield_backoff;

pub use abort::{AbortOnPanic, contain_panic, is_panic_contained};
pub use adaptive_poll::AdaptivePoll;
pub use copy::bypasses_caches;
pub use dirty::DirtyLog;
pub use dma::{DmaSpace, DmaTable, View, ViewWatch};
pub use epoll::epoll_wait;
pub use error::{DataPointerError, DmaError, Fault};
pub use event::{Edge, Edges, EventFd};
pub use eventfd_signal::{PeerDescriptor, Signals};
pub use file_status::FileStatus;
pub use mapping::{DeferredRelease, HUGE_PAGE, MapError, Mapping, Protection};
pub use notifier::prepare as prepare_signals;
pub use ring::Ring;
pub use segments::{Segment, Segments};
pub use sgl::MAX_SGL_DESCRIPTORS;
pub use shared::{SharedBytes, SharedU32};
pub use sqe_batch::SqeBatch;
pub use thread_usage::ThreadUsage;
pub use trim::trim_program_pages;
pub use view_change::{AfterChange, ViewChange};
pub use yield_backoff::YieldBackoff;
