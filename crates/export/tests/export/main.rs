//! Exports of a block device on the emulated controller, both ends in one process.

mod client;
#[path = "../../../block/tests/block/common.rs"]
mod common;
mod fuse;
mod nbd;
mod tools;
mod vhost;
