//! Clients for attacks: the client side of vfio-user, NBD and vhost-user-blk. They can send
//! arbitrary messages.
//!
//! A [`connection::Connection`] sends arbitrary bytes and descriptors. A [`guest::Guest`] is a
//! guest and its VMM: memory, registers, queues.

pub mod connection;
pub mod guest;
pub mod nbd;
pub mod queue;
pub mod virtio;
