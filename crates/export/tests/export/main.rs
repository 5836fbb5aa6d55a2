//! Exports of a disk to clients of every kind.

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
