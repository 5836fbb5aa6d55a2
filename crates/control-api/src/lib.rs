#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod api;
pub mod client;
pub mod discovery;
pub mod explain;
pub mod live_stats;
