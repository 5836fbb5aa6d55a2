#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

pub mod attach_many;
mod banner;
pub mod bench;
pub mod bind;
mod block_pattern;
pub mod demo;
pub mod inspect;
mod latency;
pub mod load;
pub mod local;
pub mod manage;
mod overwrite;
mod page;
mod queue_options;
mod report;
mod rng;
pub mod session;
pub mod trace;
pub mod transfer;
pub mod verify;
