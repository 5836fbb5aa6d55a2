//! The disk behind NBD: for QEMU, libnbd's tools, fio, and the kernel's own client.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`handshake`] | the server's end of the handshake, without a socket |
//! | `request` | what a request asks for, and whether it may |
//! | `connection` | one client: a thread and its requests |
//! | `negotiate`, `socket`, `answers` | the handshake over a socket; what is received and sent |
//! | `gather` | which answers wait for one another |
//! | `sys` | how the data of requests are sent and received |
//! | `shared` | what a server and its connections share |
//! | [`Server`] | a socket, and the clients that come to it |
//! | [`Address`] | where it listens, as people write it |
//!
//! The protocol's numbers and frames, which both ends share, are `shadowbell-nbd`'s: [`wire`],
//! [`reply`].
//!
//! # What it implements
//!
//! The fixed newstyle handshake with `EXPORT_NAME`, `GO`, `INFO`, `LIST`, `ABORT`, `STARTTLS`,
//! `STRUCTURED_REPLY` and metadata contexts (`base:allocation`); simple and structured replies; all
//! requests but resizing. Block status is what the controller says of its blocks (Get LBA Status),
//! in several extents, or all data where it does not say. A flush covers what was answered on every connection
//! (`CAN_MULTI_CONN`): the disk has one write cache, if it has any.
//!
//! TLS, for all clients or for none: one that may do without could be talked out of it by whoever
//! is in between. Each client's thread does its cryptography.
//!
//! # Threads
//!
//! A client has a thread. If the controller is in this process, that of its worker can serve a
//! client too that keeps several requests in flight ([`Options::lender`]): they are carried out
//! where they are received, and no thread wakes another. The client's own thread waits meanwhile.
//!
//! # What it does not implement
//!
//! Extended headers.

mod address;
mod answers;
mod clients;
mod connection;
mod gather;
pub mod handshake;
mod negotiate;
mod options;
mod request;
mod server;
mod shared;
mod socket;
#[allow(unsafe_code, reason = "memory that a device may change is not borrowed")]
mod sys;

pub use address::Address;
pub use options::Options;
pub use server::{Server, StartError};
pub use shadowbell_nbd::{reply, wire};
