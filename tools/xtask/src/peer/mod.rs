//! The other side of a vfio-user socket, which need not be honest.
//!
//! A [`connection::Connection`] sends whatever bytes and descriptors it is given. A
//! [`guest::Guest`] is what a guest and its VMM are together: memory, registers, queues.

pub(crate) mod connection;
pub(crate) mod guest;
pub(crate) mod nbd;
pub(crate) mod queue;
pub(crate) mod virtio;
