//! The server: listening sockets, and a reactor that serves a device behind each of them.
//!
//! # Architecture
//!
//! A [`Reactor`] is one thread, the caller's, in one `epoll_wait`. Behind each [`Listener`] there
//! is one [`Device`](crate::Device), and one client of it at a time. Nothing ticks: a reactor whose
//! clients are silent sleeps until one of them is not. A deadline exists only while something
//! is expected of a client: its first message, the end of a message, or that it reads its replies.
//!
//! # Who comes second
//!
//! A client that connects while another one is attached is left in the socket's backlog: its
//! connect succeeds and its first message waits. It is served as soon as the device is free, which
//! is when the first one is gone and nothing of the device touches its memory any more. A client
//! that leaves and comes back at once (SPDK's does, and so does a VMM that restarts) thus never
//! sees a refusal that depends on who was faster. Refusing it would need the same accept, and would
//! make such a client retry in a loop.
//!
//! # Bad peers
//!
//! A request that makes no sense gets an error reply. A stream that makes no sense, a peer that
//! leaves a message unfinished or does not read its replies, is dropped: its device learns it by
//! [`Device::disconnected`](crate::Device::disconnected), and the next one is accepted. While
//! replies wait to be read, no further requests of that peer are looked at, so what is kept for it
//! is bounded.
//!
//! A request with a descriptor that could make us wait for somebody (see
//! [`descriptor`](crate::descriptor)) is refused with EINVAL and a line in the log. Nothing here
//! ever maps such a descriptor, asks it for anything or closes it: a thread of that device's own
//! does the closing. A client that brings more of them than that thread gets rid of is dropped, and
//! the next one is let in at that socket when most of them are gone.

//!
//! # When a server is replaced
//!
//! A client has no way to come back: QEMU gives a device up when its socket closes. So the socket
//! is handed to the successor, connected as it is.
//!
//! 1. [`Handle::freeze`]: the reactor comes to rest. It takes back what another thread polls as well,
//!    finishes the message in hand of each client (an outstanding [`Done`](crate::Done) is waited
//!    for) and lets go of clients that are leaving. It begins no message and lets nobody in. What
//!    comes meanwhile waits in the sockets, and no deadline runs.
//! 2. [`Reactor::save`]: of each device its listening socket, with the file that is to be removed in
//!    the end; of its client the socket, what was agreed on, the bytes and descriptors that were
//!    received and not looked at, those that were not sent yet; and what
//!    [`Device::save`](crate::Device::save) adds. Descriptors are duplicates.
//! 3. [`Reactor::restore`], in the successor: the same, with a device that is as new. Nothing is read,
//!    sent or accepted, and dropping this reactor does nothing to a socket or its file.
//! 4. The successor [runs](Reactor::run), and the predecessor ends with [`Reactor::hand_over`]. Or
//!    something has failed until here: the predecessor runs again, as if nothing had been.
//!
//! So at each moment one of the two serves a client, and it is never none. A [`SavedPort`] that was
//! run by one is of no use to another any more.

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
