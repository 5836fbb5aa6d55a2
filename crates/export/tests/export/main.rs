//! Exports of a disk: NBD, FUSE and vhost-user-blk.

mod client;
mod fuse;
mod holes;
mod nbd;
mod tls;
mod tools;
mod vhost;
mod vhost_hostile;
mod vhost_inflight;
mod vhost_queue;
mod vhost_same;
mod vhost_stopped;
mod whole_blocks;
