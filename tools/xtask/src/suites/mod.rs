//! The guest suites: the same Linux guest, a disk under test, one question each.

mod boot;
mod chardev;
mod cloud_hypervisor;
mod comparison;
mod dmesg;
mod exporter;
mod fio;
mod fs;
mod idle;
mod kinds;
mod namespaces;
mod nvme_cli;
mod pool;
mod protection;
mod recover;
mod reset;
mod rivals;
mod s2;
mod s3;
mod s4;
mod setup;
mod shared;
mod smoke;
mod suite;
mod ublk;
mod unbroken;
mod vfio;
mod ways;
mod writer;
mod zoned;

pub(crate) use setup::{ControllerKind, Setup};
pub(crate) use suite::Suite;
