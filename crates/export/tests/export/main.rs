//! Exports of a block device on the emulated controller, both ends in one process.

mod client;
#[path = "../../../block/tests/block/common.rs"]
mod common;
mod fuse;
mod nbd;
#[path = "../../../vfio-user/tests/stalled/mod.rs"]
mod stalled;
mod tools;
mod vhost;
mod vhost_hostile;
