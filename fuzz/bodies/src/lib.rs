//! Fuzz bodies: the code under the fuzz targets.
//!
//! Each module has a function `run`, which accepts any bytes and must return: panics and hangs
//! are findings. The bytes are a *program* for the untrusted side (a host, a VMM, a controller, a
//! client), which is executed against the real code, where possible on one thread, so that an
//! input is reproducible.
//!
//! | target | untrusted side | code under test |
//! |---|---|---|
//! | [`session`] | a VMM: messages, descriptors, memory | vfio-user server with a controller |
//! | [`shared`] | a VMM whose socket two threads read | vfio-user server without a controller |
//! | [`chaos`] | a guest with arbitrary behaviour | registers, queues, DMA; metadata; zones |
//! | [`queues`] | a guest that follows the rules, on a faulty disk | the controller, against a
//! model of the result of each command |
//! | [`driver`] | a controller with arbitrary behaviour | driver: attach, queues, recovery |
//! | [`client`] | a vfio-user server | vfio-user client |
//! | [`resets`] | a guest that resets at any moment | controller with a small quota |
//! | [`subsystem`] | hosts with shared namespaces: reservations, ANA | controllers of one
//! subsystem, against a model of both |
//! | [`mod@file`] | a file system: short, failing and late calls | file-backed disk, against a
//! model |
//! | [`vhost`] | a virtio-blk guest: chains, rings, memory | queue of the vhost-user device |
//! | [`nbd`] | an NBD client, and a server | NBD server; decoder of replies |
//! | [`decode`] | any sender of structures | decoders of the specification and of the protocol |
//! | [`text`] | the author of a URI, a size or a configuration | parsers |
//!
//! `cargo xtask fuzz` runs them under libFuzzer. The tests of this crate replay the seeds and
//! some thousand pseudo-random programs on any toolchain.
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
