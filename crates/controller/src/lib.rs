//! An emulated NVMe 2.0 I/O controller with shadow doorbells.
//!
//! # Architecture
//!
//! A [`Controller`] has a control plane and a data plane, which share no lock.
//!
//! * The control plane (`control`, `admin`) handles the rare operations of a host: registers, the
//!   admin queue, DMA maps, interrupts, reset. A register access is answered on the thread that
//!   brings it, under one lock. Admin commands and notices from I/O threads are handled by the
//!   control thread, which all controllers share in turns (`control_thread`). The lock is never
//!   held during an access to guest memory, and no I/O thread ever takes it. A long operation is
//!   sent to the I/O threads as a message, and continues when the last of them drops its latch.
//! * The data plane (`worker`) is a [`Pool`] of I/O threads that all controllers of a process
//!   share. A submission queue, its completion queue and its queues to the disks belong to one I/O
//!   thread. Between the fetch of a command and the post of its completion there is no lock, no
//!   shared counter and no allocation.
//!
//! The crate contains neither sockets nor PCI: the carrier of a controller calls
//! [`Controller::read`], [`Controller::write`] and [`Controller::map_dma`], and connects
//! interrupts to eventfds.
//!
//! # Unsupported features
//!
//! Firmware update, the key-value command set, controller memory buffers and pin-based interrupts.
//! An unsupported command ends in Invalid Command Opcode.
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
pub use worker::{CLAIMABLE, MAX_WORKERS, Polling, Pool, PoolOptions, Turns};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
