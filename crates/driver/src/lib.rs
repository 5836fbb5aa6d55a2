//! A user-space NVMe driver with shadow doorbells.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | `transport` | how a controller is reached: [`Transport`], and [`VfioUser`] |
//! | `attach` | from a device in whatever state to a controller with queues |
//! | [`Controller`] | an attached controller: namespaces, queue pairs, buffers, detaching |
//! | [`QueuePair`] | an I/O queue pair of one thread: submit, ring, pop; no lock, no allocation |
//! | [`Buffer`], [`BufferPool`] | memory that was shared with the device once |
//! | [`Admin`] | the control plane: Identify, features, log pages, any admin command |
//! | [`AsyncQueue`] | futures over a queue pair, for any executor |
//!
//! # Who owns a buffer
//!
//! A buffer that was submitted belongs to its queue until the completion. Nothing that a program
//! drops, a future, a queue pair or the controller, gives memory back that the device may still
//! write to: either the device has confirmed that it is done (a completion, a deleted queue, a
//! disabled controller), or the memory is kept, with a line in the log.
//!
//! # The device is not trusted
//!
//! Completions for commands that are not outstanding, repeated ones, impossible queue heads, lists
//! out of order and data that contradict themselves are counted, logged once and ignored, or end
//! what asked for them with an error that says so. Everything that waits has a deadline.
//!
//! # What it does not implement
//!
//! VFIO and recovery (per-command abort, queue and controller reset), splitting of long requests,
//! metadata and protection information, SGLs (PRPs do as well for buffers without gaps), and
//! command sets other than NVM.
#![forbid(unsafe_code)]

mod admin;
pub mod async_queue;
mod attach;
mod command;
mod controller;
mod device;
mod dma;
mod error;
mod events;
mod namespace;
mod options;
mod prp;
mod queue;
mod shared;
mod transport;

pub use admin::{Admin, AdminData, AdminResult, LogRequest};
pub use async_queue::{AsyncNamespace, AsyncQueue};
pub use command::Command;
pub use controller::Controller;
pub use device::Registers;
pub use dma::{Buffer, BufferPool, DmaError};
pub use error::{
    AttachError, CommandError, DetachError, IoError, IoErrorKind, QueueError, Refused, RequestError,
};
pub use events::EventListener;
pub use namespace::Namespace;
pub use options::{AttachOptions, Doorbells, Timeouts};
pub use queue::{Completion, QueuePair, QueueStats, SpinPolicy, Token};
pub use transport::{BoxError, Transport, TransportError, VfioUser};
