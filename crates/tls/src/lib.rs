//! TLS for NBD clients and servers.
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`ClientTls`], [`ServerTls`] | configuration of one side, from a directory of certificates |
//! | [`Session`] | TLS of one connection: non-blocking conversion of bytes |
//! | [`CertificateError`], [`SessionError`] | messages for frequent mistakes with certificates |
//!
//! The directory of certificates has the layout of libnbd, nbdkit and QEMU. The files are read
//! once: renewed certificates need a restart.
//!
//! The memory for a peer's input is bounded by rustls (a record, a message of the handshake), and
//! a session reads from the socket only after its earlier input was consumed.
//!
//! # Not implemented
//!
//! Pre-shared keys (PSK), anonymous cipher suites, and session resumption: NBD connections are
//! long-lived.
#![forbid(unsafe_code)]

mod certificates;
mod error;
mod session;

pub use certificates::{CertificateError, ClientTls, ServerTls};
pub use error::SessionError;
pub use session::{MOST_PENDING, Session};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
