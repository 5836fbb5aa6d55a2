//! NBD export: a server for QEMU, libnbd's tools, fio, and the kernel's client.
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`handshake`] | server side of the handshake, without a socket |
//! | `request` | validation and execution of a request |
//! | `connection` | one client: a thread and its requests |
//! | `negotiate`, `socket`, `replies` | the handshake over a socket; receiving and sending |
//! | `reply_coalescing` | collection of replies, to send several together |
//! | `sys` | system calls for the data of requests |
//! | `shared` | state that a server and its connections share |
//! | [`Server`] | the listening socket and its clients |
//! | [`Address`] | listen address in text form |
//!
//! The protocol's constants and frames, for servers and clients, are in `shadowbell-nbd`:
//! [`wire`], [`reply`].
//!
//! # Implemented
//!
//! The fixed newstyle handshake with `EXPORT_NAME`, `GO`, `INFO`, `LIST`, `ABORT`, `STARTTLS`,
//! `STRUCTURED_REPLY` and metadata contexts (`base:allocation`); simple and structured replies;
//! all requests except resize. Block status is the allocation that the disk reports, in several
//! extents. A flush covers the writes that were answered on all connections (`CAN_MULTI_CONN`).
//!
//! TLS is either required for all clients or not offered, because a man in the middle could disable
//! optional TLS. Each client's thread executes the client's cryptography.
//!
//! # Threads
//!
//! Each client has a thread with its own queue of the disk. The thread that receives a request also
//! executes it, so no thread has to wake another.
//!
//! # Not implemented
//!
//! Extended headers.

mod address;
mod admission;
mod connection;
pub mod handshake;
mod negotiate;
mod options;
mod replies;
mod reply_coalescing;
mod request;
mod server;
mod shared;
mod socket;
#[allow(unsafe_code, reason = "memory that a device may change is not borrowed")]
mod sys;

pub use address::Address;
pub use options::Options;
pub use server::{Listener, Server, StartError};
pub use shadowbell_nbd::{reply, wire};
