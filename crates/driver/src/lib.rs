//! User-space NVMe driver with shadow doorbells (Doorbell Buffer Config).
//!
//! # Architecture
//!
//! Modules from the bottom up; a module imports only from the modules above it.
//!
//! | module | contents |
//! |---|---|
//! | `transport` | register, DMA and interrupt access: [`Transport`], `VfioUser` and `Vfio` |
//! | `dma`, `prp` | [`Buffer`], [`BufferPool`]: memory that is shared with the device once |
//! | `command`, `namespace` | [`Command`], [`Completion`], [`Namespace`] |
//! | `metadata` | [`BlockMetadata`] and [`MetadataCommand`]: metadata and protection information |
//! | `queue` | rings, doorbells, slots and command timeouts of any queue pair |
//! | `device`, `admin` | the registers and the admin queue; [`Admin`] is the public handle |
//! | `controller_state` | results of Identify; live, resetting or failed |
//! | `io_queues` | creating and deleting I/O queues |
//! | `configure` | features that are set when attaching, and again after a reset |
//! | `enabled_controller`, `attached_controller` | a controller before Identify, and with queues |
//! | [`recovery`] | Abort, queue recreation and controller reset after command timeouts |
//! | `queue_pair` | [`QueuePair`], of one thread: submit, ring, pop; no lock, no allocation |
//! | `attach`, `controller` | from a device to a [`Controller`], and its methods |
//! | [`async_queue`] | [`AsyncQueue`]: futures over a queue pair, for any executor |
//!
//! # Features
//!
//! `vfio` (`Vfio`: PCI devices of this machine) and `vfio-user` (`VfioUser`: controllers behind a
//! UNIX socket), both enabled by default. Without these features, the program has to implement
//! [`Transport`] itself.
//!
//! # Reading a block
//!
//! ```no_run
//! use shadowbell_driver::{AttachOptions, Controller, Transport};
//! use std::sync::Arc;
//!
//! /// Over `Vfio::open(address)?`, or `VfioUser::connect(path, timeout)?`.
//! fn first_block(transport: Arc<dyn Transport>) -> Result<Vec<u8>, Box<dyn std::error::Error>> {
//!     let mut controller = Controller::attach(transport, &AttachOptions::default())?;
//!     let namespace = controller.namespace(1).ok_or("there is no namespace 1")?.clone();
//!     let mut queue = controller.take_queue_pair().ok_or("there is no queue pair")?;
//!     let pool = controller.buffers(1, namespace.block_size() as usize)?;
//!
//!     queue.submit(namespace.read(0, 1)?, pool.take())?;
//!     queue.wait(None)?;
//!     let completion = queue.pop().ok_or("the controller was removed")?;
//!     completion.status.into_result()?;
//!     let data = completion.buffer.ok_or("there is no buffer")?.to_vec(512);
//!     drop(queue);
//!     controller.detach()?;
//!     Ok(data)
//! }
//! ```
//!
//! With futures, on any executor:
//!
//! ```no_run
//! # use shadowbell_driver::{AsyncQueue, Controller};
//! # async fn first_block(mut controller: Controller) -> Result<(), Box<dyn std::error::Error>> {
//! let queue = AsyncQueue::start(controller.take_queue_pair().ok_or("no queue pair")?)?;
//! let disk = queue.open(controller.namespace(1).ok_or("no namespace 1")?);
//! let pool = controller.buffers(16, 4096)?;
//! let buffer = disk.read(0, pool.take().ok_or("all buffers are in use")?).await?;
//! let buffer = disk.write(8, buffer).await?;
//! disk.flush().await?;
//! # drop(buffer);
//! # Ok(())
//! # }
//! ```
//!
//! # Buffer ownership
//!
//! A submitted buffer belongs to its queue until the completion. Dropping a future, a queue pair or
//! the controller never frees memory that the device may still write to: either the device has
//! confirmed that it no longer uses the memory (a completion, a deleted queue, a disabled
//! controller), or the memory is leaked, with a warning in the log.
//!
//! # The device is not trusted
//!
//! Completions for commands that are not outstanding, duplicate completions, impossible queue
//! heads, unordered lists and inconsistent data are counted, logged once and ignored, or fail the
//! request with an error that describes them. Every wait has a deadline. Commands that do not
//! complete in time start recovery, which escalates: Abort, a new queue pair, a controller reset,
//! failure of the controller ([`recovery`]).
//!
//! # Not implemented
//!
//! Splitting of long requests, storage tags, 32-bit guards, SGLs (PRPs suffice for buffers that are
//! contiguous for the device), and command sets other than NVM.
// Unsafe code is allowed only for the system calls of VFIO, in a module named `sys`.
#![deny(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

mod admin;
pub mod async_queue;
mod attach;
mod attached_controller;
mod command;
mod configure;
mod controller;
mod controller_state;
mod copy_limits;
mod device;
mod dma;
mod enabled_controller;
mod error;
#[cfg(all(feature = "vfio", feature = "vfio-user"))]
pub mod guide;
mod io_queues;
mod metadata;
mod namespace;
mod options;
mod prp;
mod queue;
mod queue_map;
mod queue_pair;
pub mod recovery;
mod transport;

pub use admin::{Admin, AdminData, AdminResult, AllocatedBlocks, LogRequest, Telemetry};
pub use async_queue::{AsyncNamespace, AsyncQueue};
pub use command::{Command, Completion, Token};
pub use controller::{Controller, EventListener};
pub use copy_limits::CopyLimits;
pub use device::Registers;
pub use dma::{Buffer, BufferPool, DmaError, SharedMemory};
pub use error::{
    AttachError, CommandError, DetachError, IoError, IoErrorKind, QueueError, Refused, RequestError,
};
pub use metadata::{BlockMetadata, MetadataCommand, ProtectionError};
pub use namespace::Namespace;
pub use options::{AttachOptions, Doorbells, Timeouts};
pub use queue::{QueueStats, SpinPolicy};
pub use queue_map::QueueMap;
pub use queue_pair::QueuePair;
pub use recovery::{Recovery, RecoveryStats};
#[cfg(feature = "vfio-user")]
pub use transport::VfioUser;
pub use transport::{BoxError, Transport, TransportError};
#[cfg(feature = "vfio")]
pub use transport::{PciAddress, PciFunction, SYSFS, Steered, Vfio, VfioError, steer_interrupts};
