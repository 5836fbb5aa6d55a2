//! What the fuzz targets do with their bytes.
//!
//! Each module has a `run`, which takes any bytes and must come to its end: a panic is a finding,
//! and so is a hang. The bytes are a *program* for the untrusted side (a host, a VMM, a controller,
//! a client), which is carried out against the real code, on one thread and by turns where that is
//! possible, so that an input does the same each time.
//!
//! | target | the untrusted side | what it is set upon |
//! |---|---|---|
//! | [`session`] | a VMM: messages, descriptors, memory | the vfio-user server with a controller behind it |
//! | [`shared`] | a VMM whose socket two threads read | the same without a controller |
//! | [`chaos`] | a guest that does anything | its registers, queues, DMA; metadata; zones |
//! | [`queues`] | a guest that keeps to the rules, over a disk that need not | the same, against a model of what must come of each command |
//! | [`driver`] | a controller that does anything | the driver: attach, queues, recovery |
//! | [`client`] | a vfio-user server | the client |
//! | [`resets`] | a guest that resets at any moment | the controller, with a small quota |
//! | [`subsystem`] | hosts that share namespaces: reservations, and ways that are none | controllers of one subsystem, against a model of both |
//! | [`mod@file`] | a file system: short, failing and late calls | a file as a disk, against a model |
//! | [`vhost`] | a virtio-blk guest: chains, rings, memory | a queue of the vhost-user device |
//! | [`nbd`] | an NBD client, and a server | the server; the decoder of replies |
//! | [`decode`] | whoever sends structures | the decoders of the specification and of the protocol |
//! | [`text`] | whoever writes a URI, a size or a configuration | their parsers |
//!
//! `cargo xtask fuzz` runs them under libFuzzer. The tests of this crate replay the seeds and some
//! thousand pseudo-random programs on any toolchain.
#![forbid(unsafe_code)]

pub mod chaos;
pub mod client;
pub mod decode;
pub mod driver;
pub mod file;
pub mod nbd;
pub mod queues;
pub mod resets;
pub mod session;
pub mod shared;
pub mod subsystem;
pub mod text;
pub mod vhost;

mod command;
mod layered;
mod limits;
mod source;
mod test_disk;
mod vmm;

pub use limits::steps;
