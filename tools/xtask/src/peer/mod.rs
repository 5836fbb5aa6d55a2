//! Clients for attacks: the client side of vfio-user, NBD and vhost-user-blk, with arbitrary
//! messages.
//!
//! A [`connection::Connection`] sends arbitrary bytes and descriptors. A [`guest::Guest`] is a
//! guest and its VMM: memory, registers, queues.

pub(crate) mod connection;
pub(crate) mod guest;
pub(crate) mod nbd;
pub(crate) mod queue;
pub(crate) mod virtio;
