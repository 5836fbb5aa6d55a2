//! Emulated NVMe controller with its front ends: the crate for integrators.
//!
//! # Architecture
//!
//! [`shadowbell_controller`] is an NVMe controller that is independent of sockets and PCI. This
//! crate connects it to a host:
//!
//! | module | host |
//! |---|---|
//! | [`vfio_user`] | a VMM or a driver in another process, over a vfio-user socket |
//! | [`in_process`] | the driver in the same process, by function calls |
//!
//! ```text
//!   QEMU, Cloud Hypervisor, SPDK            shadowbell-driver
//!            │ vfio-user socket                    │ function calls
//!     Reactor, Listener (shadowbell-vfio-user)     │
//!            │                                     │
//!     ControllerDevice                        InProcess
//!            └──────────► Controller ◄─────────────┘
//!                             │
//!                     Pool: I/O threads ──► Disk (shadowbell-disk)
//! ```
//!
//! No I/O command passes through this crate, because the I/O threads access the host's queues
//! directly, in memory that the host shares. This crate handles register accesses, trapped
//! doorbells, memory maps and the eventfds of interrupts.
//!
//! # A controller for a VM
//!
//! `examples/serve.rs` is the complete program.
//!
//! ```no_run
//! use shadowbell_controller::config::uuid_from;
//! use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Pool, PoolOptions};
//! use shadowbell_vfio_user::{Listener, Reactor};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = shadowbell_disk_file::open("/var/lib/vm0.img")?;
//! let namespaces = vec![NamespaceConfig { uuid: uuid_from("vm0"), disk }];
//! let config = Config { namespaces, ..Config::default() };
//! let pool = Pool::start(&PoolOptions::default())?;
//! let controller = Controller::new(config, pool, Carrier::default())?;
//!
//! let events = Arc::new(|event| println!("{event:?}"));
//! let device = shadowbell_frontend::ControllerDevice::new(controller, events)?;
//! let mut reactor = Reactor::new(Default::default())?;
//! reactor.add(Listener::bind("/run/vm0.sock")?, Box::new(device))?;
//! reactor.run()?;
//! # Ok(())
//! # }
//! ```
//!
//! # A controller for the driver in this process
//!
//! ```
//! use shadowbell_driver::{AttachOptions, Controller};
//! use shadowbell_frontend::InProcess;
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ssd = InProcess::over(shadowbell_disk_file::open("mem:1MiB")?)?;
//! let controller = Controller::attach(Arc::new(ssd), &AttachOptions::default())?;
//! assert_eq!(controller.namespace(1).map(|namespace| namespace.bytes()), Some(1 << 20));
//! # Ok(())
//! # }
//! ```
//!
//! # Not implemented
//!
//! * Configuration files, command line, signals: the program `shadowbell` has them.
//! * Interrupt pin and I/O space. In D3hot, the registers remain accessible.
//! * Memory without a descriptor: a VMM must share its guest's memory as a file.
#![forbid(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub mod in_process;
pub mod vfio_user;

pub use in_process::{InProcess, StartError};
pub use vfio_user::ControllerDevice;
