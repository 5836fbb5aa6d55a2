#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod disk_files;
pub mod disk_kinds;
pub mod disk_open;
pub mod disk_recovery;
pub mod disk_reference;
mod nvme_disk;
pub mod transport;
