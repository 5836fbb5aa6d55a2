//! vfio-user server: listening sockets, and a reactor that serves a device behind each of them.
//!
//! # Architecture
//!
//! A [`Reactor`] runs on the thread of its caller, in one `epoll_wait`. Each [`Listener`] has one
//! [`Device`](crate::Device), and one client at a time. The reactor has no periodic timer, and
//! sleeps if all clients are idle. It sets a deadline only while it waits for a client: for the
//! first message, for the rest of a message, or until the client has read replies.
//!
//! # Second client
//!
//! If a client connects while another one is attached, the new client stays in the socket's
//! backlog: its connect succeeds, and its first message waits. It is served when the first client
//! has disconnected and the device no longer accesses that client's memory. So a client that
//! disconnects and connects again immediately (SPDK's client, or a restarting VMM) is not refused
//! because of a race. To refuse the second client, the server would have to accept it too, and
//! refused clients would retry in a loop.
//!
//! # Misbehaving clients
//!
//! An invalid request gets an error reply. An undecodable stream ends the connection. If a client
//! misses the deadline for the rest of a message, or for reading replies, its connection ends too.
//! The server then calls [`Device::disconnected`](crate::Device::disconnected), and accepts the
//! next client. While replies wait to be sent, no further requests of the client are handled, so
//! the memory for a client is bounded.
//!
//! A request with a descriptor that may block (see [`descriptor`](crate::descriptor)) is refused
//! with EINVAL and a log message. A descriptor that may block is never mapped or queried, and only
//! separate threads of its device close it. If a client sends these descriptors faster than they
//! are closed, it is disconnected, and the next client of that socket is accepted when most of them
//! are closed.
//!
//! # Transfer to another server process
//!
//! Clients cannot connect again: QEMU gives a device up when the socket closes. So the connected
//! socket is passed to the next server process.
//!
//! 1. [`Handle::add_recorded`] serves a device with checkpoints, which a [`PortRecorder`] stores:
//!    the listening socket with its file; the client's socket, negotiated limits and unsent
//!    replies; and the state of [`Device::record`](crate::Device::record). Descriptors are
//!    duplicated. A message stays in the socket until a checkpoint contains its effects.
//! 2. The process ends: by a crash at any moment, or planned. [`Handle::freeze`] quiesces the
//!    reactor before a planned end. It takes back sockets that are shared with other threads,
//!    finishes messages that have started, waits for an outstanding
//!    [`Completer`](crate::Completer), and waits until devices have released clients that have
//!    disconnected. It starts no message and accepts no client. Data that arrive meanwhile stay in
//!    the sockets, and no deadline runs.
//! 3. [`RestoredPort::new`] in the next process restores the last checkpoint, with a new device. It
//!    does not read, send or accept anything. If it is dropped, sockets and their files stay.
//! 4. [`Reactor::serve_restored`] or [`Handle::restore`] serves it. If a step before has failed, a
//!    quiesced process calls [`run`](Reactor::run) again and continues. Otherwise it ends; a
//!    process that lives on drops the reactor by [`Reactor::release_to_successor`].
//!
//! So exactly one of the two processes serves a client.

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

pub use crate::exchange::prepare as prepare_exchange;
pub use inbox::{Handle, PortId};
pub use limits::{Limits, MAX_MSG_FDS};
pub use listener::{
    BindError, BindOptions, Listener, ListenerParts, SavedListener, remove_socket,
    remove_sockets_by,
};
pub use reactor::{Reactor, RestoredPort, RunEnd};
pub use recorder::PortRecorder;
pub use saved::SavedPort;
