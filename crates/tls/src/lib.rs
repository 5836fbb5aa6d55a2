//! TLS for both ends of NBD.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`ClientTls`], [`ServerTls`] | a directory of certificates, as an end of connections |
//! | [`Session`] | a connection: bytes in and out, without waiting |
//! | [`CertificateError`], [`SessionError`] | what people do wrong, in sentences |
//!
//! The certificates lie in a directory as libnbd, nbdkit and QEMU have it. They are read once:
//! whoever has renewed them starts again.
//!
//! What a peer may send is bounded by rustls (a record, a message of the handshake), and a session
//! takes no more from the socket before what it has is read.
//!
//! # What it does not implement
//!
//! Keys that both ends have (PSK), anonymous ones, and sessions that are taken up again: a
//! connection of NBD lasts.
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
