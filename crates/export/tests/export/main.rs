//! Exports of a block device on the emulated controller, both ends in one process.

mod client;
mod fuse;
mod holes;
mod nbd;
mod tls;
mod tools;
mod vhost;
mod vhost_direct;
mod vhost_hostile;
mod vhost_inflight;
mod vhost_same;
mod vhost_stopped;
mod whole_blocks;
