//! An emulated NVMe controller and the way to it: what an integrator embeds.
//!
//! # Architecture
//!
//! [`shadowbell_controller`] is an NVMe controller that knows nothing of sockets or of PCI. This
//! crate carries it to a host:
//!
//! | module | who reaches the controller |
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
//!                     Pool: worker threads ──► Disk (shadowbell-backend)
//! ```
//!
//! Nothing of this is on the path of a command: the workers read the host's queues in the memory
//! that it shares. What passes through here are registers, doorbells that trap, memory maps, and
//! the eventfds of interrupts.
//!
//! # A controller for a VM
//!
//! The whole program is `examples/serve.rs`.
//!
//! ```no_run
//! use shadowbell_controller::config::uuid_from;
//! use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Pool, PoolOptions};
//! use shadowbell_vfio_user::{Listener, Reactor};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let disk = shadowbell_backend::open("/var/lib/vm0.img")?;
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
//! let ssd = InProcess::over(shadowbell_backend::open("mem:1MiB")?)?;
//! let controller = Controller::attach(Arc::new(ssd), &AttachOptions::default())?;
//! assert_eq!(controller.namespace(1).map(|namespace| namespace.bytes()), Some(1 << 20));
//! # Ok(())
//! # }
//! ```
//!
//! # What it does not do
//!
//! * No configuration files, no command line, no signals: that is the program `shadowbell`.
//! * No migration: a device can be handed to another process on the same machine
//!   ([`shadowbell_vfio_user::server`]), and no further.
//! * No interrupt pin and no I/O space; D3hot keeps the registers accessible.
//! * No memory without a descriptor: a VMM has to share its guest's memory as a file.
#![forbid(unsafe_code)]

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub mod in_process;
pub mod vfio_user;

pub use in_process::{InProcess, StartError};
pub use vfio_user::ControllerDevice;
