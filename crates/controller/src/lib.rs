//! An emulated NVMe 2.0 I/O controller with shadow doorbells.
#![forbid(unsafe_code)]

pub mod admin;
pub mod config;
