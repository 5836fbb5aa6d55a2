//! An emulated NVMe 2.0 I/O controller with shadow doorbells.
//!
//! # Architecture
//!
//! A [`Controller`] has a control plane and a data plane that never meet on a lock.
//!
//! * The control plane (`control`, `admin`) is everything that a host does seldom: registers, the
//!   admin queue, DMA maps, interrupts, reset. Registers are answered on whatever thread brings the
//!   access, under one lock. Admin commands run on a thread of their own, which all controllers
//!   share by turns (`control_thread`), and so does what follows from what workers have said. The
//!   lock is never held while the guest's memory is touched, and no worker ever takes it. What
//!   takes time is sent to the workers as a message, and goes on when the last of them drops its
//!   latch.
//! * The data plane (`worker`) is a [`Pool`] of threads that all controllers of a process share. A
//!   submission queue, the completion queue that it feeds and its way to the disks belong to one
//!   worker. Between the fetch of a command and the post of its completion there is no lock, no
//!   shared counter and no allocation.
//!
//! The crate knows nothing of sockets or of PCI: whoever carries a controller to a host calls
//! [`Controller::read`], [`Controller::write`] and [`Controller::map_dma`], and connects
//! interrupts to eventfds.
//!
//! # What it does not implement
//!
//! Metadata and protection information, firmware update, zoned and key-value command sets,
//! controller memory buffers, pin-based interrupts. A command that is not implemented ends in
//! Invalid Command Opcode.
#![forbid(unsafe_code)]

mod admin;
mod admin_server;
pub mod config;
mod context;
mod control;
mod control_thread;
mod controller;
mod doorbell_source;
mod event;
mod exec;
#[cfg(feature = "faults")]
pub mod faults;
mod inbox;
mod inquiry;
mod interrupt;
mod journal;
mod latch;
mod lba_status;
pub mod measured;
mod migrated;
mod namespace;
mod notice;
mod plane;
mod pool;
mod queue;
mod recorder;
mod reservation_file;
mod reservations;
mod route;
mod saved;
mod shared;
pub mod stats;
mod subsystem;
mod successor;
#[cfg(test)]
mod test_disk;
pub mod trace;
mod uncorrectable;
mod unserved;
mod visit;
mod worker;

pub use config::{Config, ConfigError, NamespaceConfig};
pub use control::{DoorbellEventfds, NamespaceError};
pub use controller::{Announcement, BAR0_BYTES, Carrier, Controller, NewError};
pub use doorbell_source::{DoorbellSource, PolledDoorbells};
pub use event::Event;
pub use exec::Quota;
pub use inquiry::Inquiry;
pub use migrated::MigratedController;
pub use pool::{
    NamespacePool, PoolAct, PoolDone, PoolNamespace, PoolOrder, PoolOutcome, PoolPort, PoolState,
    SanitizePhase, SanitizeStatus,
};
pub use recorder::Recorder;
pub use route::RelocateError;
pub use saved::{Death, SavedController, SeenNamespace};
pub use stats::Stats;
pub use subsystem::{JoinError, MAX_ANA_GROUPS, MAX_CONTROLLERS, Member, Subsystem};
pub use successor::{RestoreError, SaveError};
pub use worker::{
    CLAIMABLE, MAX_WORKERS, Polling, Pool, PoolOptions, ThreadJob, Turns, WorkerThread,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
