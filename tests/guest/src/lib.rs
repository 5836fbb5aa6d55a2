//! Guest suites: each boots a Linux guest with a disk under test, and tests one subject.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the suites are no interface for other projects")]

mod ana;
mod boot;
mod chardev;
mod cloud_hypervisor;
mod comparison;
mod disk_types;
mod dmesg;
mod doorbells;
mod driver;
mod exporter;
mod fio;
mod fs;
mod idle;
mod namespaces;
mod nvme_cli;
mod pool;
mod protection;
mod readers;
mod recover;
mod replacement;
mod reservations;
mod reset;
mod setup;
mod shared;
pub mod shell;
mod smoke;
mod suite;
mod ublk;
mod vfio;
mod writer;
mod zoned;

pub use setup::{ControllerKind, Setup};
pub use suite::Suite;
