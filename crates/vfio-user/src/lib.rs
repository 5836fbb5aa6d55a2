//! vfio-user protocol: a PCI device in one process, used by another process over a UNIX socket
//! that carries register accesses, interrupts and shared memory.
//!
//! The protocol is specified by QEMU in `docs/interop/vfio-user.rst`. This crate is independent of
//! NVMe and of any other device type.
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`wire`] | header and payload of every message, in memory layout |
//! | [`capabilities`] | JSON of the version negotiation |
//! | [`codec`] | bytes and descriptors to messages and back, without sockets |
//! | [`descriptor`] | type check of received descriptors, and closing them without blocking |
//! | [`handover`] | errors of transferring a client to another server process |
//! | [`device`] | trait [`Device`]: the callbacks of a device |
//! | [`server`] | listening sockets and a reactor, one thread for any number of devices |
//! | [`client`] | blocking client, shared by any number of threads |
//! | [`migration`] | device migration: messages, states, and callbacks of a device |
//! | [`pci`] | configuration space of a PCI Express endpoint |
//!
//! # Example
//!
//! A server and its client, which usually run in different processes.
//!
//! ```no_run
//! use shadowbell_vfio_user::{Client, Device, Listener, Reactor};
//!
//! fn serve(device: Box<dyn Device>) -> Result<(), Box<dyn std::error::Error>> {
//!     let mut reactor = Reactor::new(Default::default())?;
//!     reactor.add(Listener::bind("/run/vm0.sock")?, device)?;
//!     reactor.run()?;
//!     Ok(())
//! }
//!
//! fn attach() -> Result<(), Box<dyn std::error::Error>> {
//!     let client = Client::connect("/run/vm0.sock", Default::default())?;
//!     let mut version = [0; 4];
//!     client.region_read(0, 8, &mut version)?;
//!     Ok(())
//! }
//! ```
//!
//! # Not implemented
//!
//! The optional migration states (P2P, PRE_COPY), twin sockets, and DMA by message (DMA_READ,
//! DMA_WRITE). The server passes a map without a descriptor to the device, which accepts or refuses
//! the map. Other commands are refused with EOPNOTSUPP.
#![deny(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

mod address;
pub mod capabilities;
pub mod client;
pub mod codec;
mod completer;
pub mod descriptor;
pub mod device;
mod exchange;
pub mod handover;
mod log_limit;
pub mod migration;
pub mod pci;
pub mod server;
mod shared_socket;
mod socket;
pub mod wire;

pub use client::Client;
pub use device::{Completer, Device};
pub use handover::{RestoreError, SaveError};
pub use log_limit::LogLimit;
pub use migration::{Migration, MigrationState};
pub use rustix::io::Errno;
pub use server::{Listener, Reactor};
pub use shared_socket::{PolledWrites, SharedSocket};
