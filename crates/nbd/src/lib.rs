//! NBD on the wire, for both ends: [the numbers and frames](wire), and [replies](reply). No sockets
//! and no threads.
#![forbid(unsafe_code)]

pub mod reply;
pub mod wire;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
