//! Servers and clients of the protocol, and peers that break its rules.

#[path = "../common/mod.rs"]
mod common;

mod bad_peers;
mod client;
mod interoperability;
mod malicious_servers;
mod protocol;
