#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod disk_open;
pub mod disk_recovery;
pub mod transport;
