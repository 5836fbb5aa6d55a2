//! Bodies of the fuzz targets.
//!
//! Each module has a function `run`, which takes any bytes and must return. A panic or a hang is a
//! finding. The bytes are a *program* for the untrusted side (host, VMM, controller, client), which
//! runs against the real code. Where possible, both sides take turns on one thread, so that an
//! input always has the same result.
//!
//! | target | untrusted side | code under test |
//! |---|---|---|
//! | [`session`] | a VMM: messages, descriptors, memory | the vfio-user server with a controller |
//! | [`shared`] | a VMM whose socket two threads read | the vfio-user server without a controller |
//! | [`chaos`] | a hostile guest | registers, queues, DMA; metadata; zones |
//! | [`queues`] | a correct guest, over a faulty disk | queues and DMA, against a model |
//! | [`driver`] | a hostile controller | the driver: attach, queues, recovery |
//! | [`client`] | a vfio-user server | the vfio-user client |
//! | [`resets`] | a guest that resets at any moment | the controller, with a small quota |
//! | [`subsystem`] | hosts that share namespaces | reservations and ANA states, against a model |
//! | [`mod@file`] | short, failing and late file system calls | a file as disk, against a model |
//! | [`qcow2`] | the author of an image | a qcow2 image as a disk |
//! | [`vhost`] | a virtio-blk guest: chains, rings, memory | a queue of the vhost-user device |
//! | [`nbd`] | an NBD client, and a server | the NBD server; the decoder of replies |
//! | [`mod@doorbell`] | a host: doorbell values | their validation, against a model |
//! | [`decode`] | a sender of structures | the decoders of the specification and of the protocol |
//! | [`text`] | an author of a URI, a size or a configuration | the parsers of these texts |
//!
//! `cargo xtask fuzz` runs the targets under libFuzzer. The tests of this crate replay the corpus
//! and some thousand pseudo-random programs on any toolchain.
#![forbid(unsafe_code)]

pub mod chaos;
pub mod client;
pub mod decode;
pub mod doorbell;
pub mod driver;
pub mod file;
pub mod nbd;
pub mod qcow2;
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
