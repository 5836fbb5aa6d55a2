//! NBD wire format for clients and servers: [constants and frames](wire), and [replies](reply).
//! Contains no sockets and no threads.
#![forbid(unsafe_code)]

pub mod reply;
pub mod wire;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
