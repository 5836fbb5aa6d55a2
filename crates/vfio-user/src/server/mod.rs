//! vfio-user server: listening sockets, and a reactor that serves a device behind each of them.
//!
//! # Architecture
//!
//! A [`Reactor`] runs on one thread, the caller's, in one `epoll_wait`. Each [`Listener`] has one
//! [`Device`](crate::Device), and one client at a time. There is no periodic timer: a reactor with
//! idle clients sleeps. A deadline exists only while a client has to act: to send its first
//! message, to complete a message, or to read its replies.
//!
//! # Second client
//!
//! A client that connects while another one is attached stays in the socket's backlog: its connect
//! succeeds, and its first message waits. It is served as soon as the first client has disconnected
//! and the device does not access the memory of the first client any more. So a client that
//! disconnects and connects again at once (SPDK's, or a restarting VMM) is never refused because of
//! a race. Refusing the second client would need the same accept, and would make such clients retry
//! in a loop.
//!
//! # Misbehaving clients
//!
//! An invalid request gets an error reply. An undecodable stream, an incomplete message, or unread
//! replies end the connection after their deadline: the device is notified by
//! [`Device::disconnected`](crate::Device::disconnected), and the next client is accepted. While
//! replies wait to be sent, no further requests of the client are handled, so the memory for a
//! client is bounded.
//!
//! A request with a descriptor that may block (see [`descriptor`](crate::descriptor)) is refused
//! with EINVAL and a log message. Such a descriptor is never mapped or queried, and only closed on
//! separate threads of its device. A client that sends more such descriptors than are closed is
//! dropped, and the next client of that socket is accepted when most of them are closed.
//!
//! # Transfer to another server process
//!
//! A client cannot connect again: QEMU gives a device up when the socket closes. Therefore the
//! connected socket is passed to the next server process.
//!
//! 1. [`Handle::freeze`] quiesces the reactor: it takes back sockets that are shared with other
//!    threads, finishes started messages (and awaits an outstanding [`Done`](crate::Done)), and has
//!    devices release clients that have disconnected. It starts no message and accepts no client.
//!    Data that arrive meanwhile stay in the sockets, and no deadline runs.
//! 2. [`Reactor::save`] serializes, for each device, the listening socket with its file; the
//!    client's socket, negotiated limits, received but undecoded bytes and descriptors, and unsent
//!    ones; and the state of [`Device::save`](crate::Device::save). Descriptors are duplicates.
//! 3. [`Reactor::restore`] in the next process restores all that, with a new device. It reads,
//!    sends and accepts nothing, and dropping this reactor affects neither sockets nor their files.
//! 4. The next process calls [`run`](Reactor::run), and the previous one ends with
//!    [`Reactor::hand_over`]. If a step has failed, the previous process calls `run` again and
//!    continues.
//!
//! So a client is served by exactly one of the two processes. A [`SavedPort`] is useless after a
//! process has run with it.

mod attachment;
#[cfg(test)]
mod attachment_model;
mod decode;
mod describe;
mod inbox;
mod limits;
mod listener;
mod migrating;
mod reactor;
mod recorder;
mod requests;
mod saved;
mod session;
mod sys;
mod turn;

pub use inbox::{Handle, PortId};
pub use limits::{Limits, MAX_MSG_FDS};
pub use listener::{
    BindError, Listener, ListenerParts, SavedListener, remove_socket, remove_sockets_by,
};
pub use reactor::{Ended, Reactor};
pub use recorder::PortRecorder;
pub use saved::SavedPort;
