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
//! The directory of certificates has the layout of libnbd, nbdkit and QEMU. The files are read only
//! once, so the program must be restarted after certificates were renewed.
//!
//! The memory for a peer's input is limited: rustls holds at most a record or a handshake message,
//! and a session reads from the socket only after the earlier input was consumed.
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
