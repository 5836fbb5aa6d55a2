//! Queue of replies, many of which are sent by one system call.

use super::socket::ClientSocket;
use super::sys::MAX_VECTORS;
use crate::data::Data;
use crate::vectors::Part;
use rustix::io::Errno;
use shadowbell_nbd::reply::Head;
use std::collections::VecDeque;

/// Largest number of replies per system call.
const BATCH: usize = MAX_VECTORS / 2;

/// Reply to the request in `slot`.
pub(super) struct Reply {
    pub(super) slot: usize,
    pub(super) head: Head,
    pub(super) data: Data,
    /// Number of data bytes to send.
    pub(super) len: usize,
    /// True if more pieces of the same read follow.
    pub(super) more: bool,
}

impl Reply {
    fn total(&self) -> usize {
        self.head.bytes().len() + self.len
    }
}

/// Result of sending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    All,
    /// The send buffer of the socket is full.
    Blocked,
    /// The client has disconnected. Its replies are dropped.
    Gone,
}

/// Replies in the order of sending.
pub(super) struct Replies {
    queue: VecDeque<Reply>,
    /// Number of bytes of the first reply that were sent.
    sent: usize,
}

impl Replies {
    pub(super) fn with_capacity(count: usize) -> Self {
        Self { queue: VecDeque::with_capacity(count), sent: 0 }
    }

    pub(super) fn push(&mut self, reply: Reply) {
        self.queue.push_back(reply);
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// True if no reply has data.
    pub(super) fn have_no_data(&self) -> bool {
        self.queue.iter().all(|reply| reply.len == 0)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Sends as many replies as the socket accepts. Calls `done` for each reply that was sent
    /// (true) or dropped because the client has disconnected (false).
    pub(super) fn send(
        &mut self,
        socket: &mut ClientSocket,
        mut done: impl FnMut(Reply, bool),
    ) -> Result<Sent, Errno> {
        while !self.queue.is_empty() {
            let mut skip = self.sent;
            let mut parts = [Part::NONE; MAX_VECTORS];
            let mut used = 0;
            for reply in self.queue.iter().take(BATCH) {
                let head = reply.head.bytes();
                let of_head = skip.min(head.len());
                let of_data = (skip - of_head).min(reply.len);
                skip -= of_head + of_data;
                let head = Part::of(head.get(of_head..).unwrap_or_default());
                for part in [head, reply.data.part(of_data, reply.len)] {
                    if part.len() > 0
                        && let Some(place) = parts.get_mut(used)
                    {
                        *place = part;
                        used += 1;
                    }
                }
            }
            let parts = parts.get(..used).unwrap_or_default();
            match socket.send(parts) {
                Ok(count) => self.sent += count,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => return Ok(Sent::Blocked),
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    self.queue.drain(..).for_each(|reply| done(reply, false));
                    self.sent = 0;
                    return Ok(Sent::Gone);
                }
                Err(errno) => return Err(errno),
            }
            while let Some(first) = self.queue.front()
                && self.sent >= first.total()
                && let Some(reply) = self.queue.pop_front()
            {
                self.sent -= reply.total();
                done(reply, true);
            }
        }
        match socket.flush() {
            Ok(true) => Ok(Sent::All),
            Ok(false) => Ok(Sent::Blocked),
            Err(Errno::PIPE | Errno::CONNRESET) => Ok(Sent::Gone),
            Err(errno) => Err(errno),
        }
    }
}
