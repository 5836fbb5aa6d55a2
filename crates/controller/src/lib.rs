//! An emulated NVMe 2.0 I/O controller with shadow doorbells.
//!
//! # Architecture
//!
//! A [`Controller`] has a control plane and a data plane, which share no lock.
//!
//! * The control plane (`control`, `admin`) handles the rare operations of a host: registers, the
//!   admin queue, DMA maps, interrupts, reset. Register accesses are handled under one lock, on the
//!   thread of the caller. Admin commands and notices from I/O threads are handled by the control
//!   thread, on which all controllers take turns (`control_thread`). No thread accesses guest
//!   memory under the lock, and no I/O thread ever takes it. A long operation sends a message to
//!   the I/O threads; it continues when the last of them drops its clone of the operation's latch.
//! * The data plane (`worker`) is a [`Pool`] of I/O threads, which all controllers of a process
//!   share. A submission queue, its completion queue and its queues to the disks belong to one I/O
//!   thread. Between the fetch of a command and the post of its completion there is no lock, no
//!   shared counter and no allocation.
//!
//! The crate contains neither sockets nor PCI. The front end of a controller calls
//! [`Controller::read`], [`Controller::write`] and [`Controller::map_dma`], and connects interrupts
//! to eventfds.
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
mod control_plane;
mod control_thread;
mod controller;
mod event;
mod exec;
#[cfg(feature = "faults")]
pub mod faults;
mod interrupt;
mod journal;
pub mod latency_stats;
mod lba_status;
mod migration_state;
mod namespace;
mod notice;
mod outstanding;
mod pool;
mod queue;
mod reservations;
mod restore_error;
mod route;
mod saved;
mod shared;
pub mod stats;
mod subsystem;
#[cfg(test)]
mod test_disk;
pub mod trace;
mod uncorrectable;
mod worker;

pub use admin::OutOfBandCommand;
pub use config::{Config, ConfigError, NamespaceConfig};
pub use control::{DoorbellEventfds, NamespaceError};
pub use controller::{Announcement, BAR0_BYTES, Carrier, Controller, NewError};
pub use event::Event;
pub use exec::Quota;
pub use journal::InFlightCommand;
pub use migration_state::MigrationState;
pub use outstanding::{Outstanding, ThreadSample};
pub use pool::{
    NamespacePool, PoolAct, PoolCallback, PoolNamespace, PoolOrder, PoolOutcome, PoolPort,
    PoolState, SanitizePhase, SanitizeStatus,
};
pub use restore_error::{RestoreError, SaveError};
pub use route::RelocateError;
pub use saved::{CauseOfDeath, Recorder, SavedController, SeenNamespace};
pub use stats::Stats;
pub use subsystem::{JoinError, MAX_ANA_GROUPS, MAX_CONTROLLERS, Member, Subsystem};
pub use worker::{
    CLAIMABLE, DoorbellSource, MAX_WORKERS, PolledDoorbells, Polling, Pool, PoolOptions, Turns,
    notify_activity, wait_for_activity,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
