//! The vfio-user protocol: a PCI device that lives in one process and is used from another, over
//! a UNIX socket that carries its registers, its interrupts and the memory it may reach.
//!
//! The protocol is the one that QEMU documents in `docs/interop/vfio-user.rst`. This crate knows
//! nothing of NVMe or of any other device.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`wire`] | the header and the payload of every command, as they lie in memory |
//! | [`capabilities`] | the JSON that version negotiation exchanges |
//! | [`codec`] | bytes and descriptors in, whole messages out; no sockets |
//! | [`descriptor`] | what a descriptor is that a peer sent, and closing what nobody should wait for |
//! | [`handover`] | why a client can not be handed over to another server, or not be taken over |
//! | [`device`] | the [`Device`] trait: what a server asks of the device it serves |
//! | [`server`] | listening sockets and a reactor, one thread for any number of devices |
//! | [`client`] | the other end: a blocking client that any number of threads may share |
//! | [`migration`] | moving a device to another server: messages, states, what a device does |
//! | [`pci`] | the configuration space of a PCI Express endpoint |
//!
//! # Example
//!
//! A server and its client; usually they are different processes.
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
//! # What it does not implement
//!
//! The optional states of migration (P2P, PRE_COPY), twin sockets, and DMA by message (DMA_READ, DMA_WRITE): a server hands a map without a descriptor
//! to its device, and the device decides. Commands that are not implemented get EOPNOTSUPP.
#![deny(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

mod address;
pub mod capabilities;
pub mod client;
pub mod codec;
pub mod descriptor;
pub mod device;
mod done;
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
pub use device::{Device, Done};
pub use handover::{RestoreError, SaveError};
pub use log_limit::LogLimit;
pub use migration::{Migration, MigrationState};
pub use rustix::io::Errno;
pub use server::{Listener, Reactor};
pub use shared_socket::{PolledWrites, SharedSocket};
