//! Exchange: sends a reply and removes its request from the socket, in one system call.
//!
//! If checkpoints are on, a message stays in the socket until it is executed. Then the reply is
//! sent and the message is removed. If the process were killed between the two steps, the next
//! process would not know which steps were done, and would send the reply twice or never. So one
//! system call does both. io_uring executes submitted operations that do not block before the
//! system call returns, and a kill does not interrupt them.

mod sys;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::Errno;
use crate::descriptor::{Closer, PeerFd};

/// Creates the io_uring instances of `count` reactors, before the process installs its system call
/// filter: the filter forbids the creation of more. A reactor without an instance sends a reply and
/// removes its request in two system calls. Returns the number of instances: 0 if the system
/// permits no io_uring with restrictions (Linux 5.10 or later).
///
/// On Linux 6.5 or later, these instances send by `WRITE` instead of `SENDMSG`, so that a process
/// under an attacker's control cannot connect a TCP socket with them. They send no descriptors, and
/// the process must ignore `SIGPIPE`, as Rust programs do.
pub fn prepare(count: usize) -> usize {
    sys::prepare(count)
}

/// Ring that sends a reply and removes its request together.
#[derive(Debug)]
pub(crate) struct Exchange {
    ring: sys::Ring,
    /// Buffer for the removed bytes. The reactor has read and handled these bytes before, so the
    /// contents of the buffer are not used.
    scratch: Vec<u8>,
}

/// Result of one exchange.
#[derive(Debug)]
pub(crate) struct Exchanged {
    /// Number of bytes of the reply that were sent.
    pub(crate) sent: Result<usize, Errno>,
    /// Number of removed bytes.
    pub(crate) received: Result<usize, Errno>,
    /// Descriptors that arrived with the removed bytes. The reactor has received duplicates of them
    /// before, when it read the message without removing it.
    pub(crate) fds: Vec<PeerFd>,
}

impl Exchange {
    /// Creates the ring.
    ///
    /// # Errors
    ///
    /// io_uring is not permitted or not available, or memory or descriptors are exhausted.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { ring: sys::Ring::new()?, scratch: Vec::new() })
    }

    /// Sends as much of `reply` as the socket accepts, with `fds`, and removes `len` received bytes
    /// from the socket. The socket must contain that many. If the kernel has no memory, or the ring
    /// sends no descriptors ([`prepare`]), the method sends and removes nothing, and returns `None`.
    pub(crate) fn reply_and_receive<'a>(
        &mut self,
        socket: BorrowedFd<'_>,
        reply: &[u8],
        fds: impl Iterator<Item = &'a OwnedFd>,
        len: usize,
        closer: &Arc<Closer>,
    ) -> Option<Exchanged> {
        let fds: Vec<_> = fds.map(AsFd::as_fd).collect();
        if self.scratch.len() < len {
            self.scratch.resize(len, 0);
        }
        let scratch = self.scratch.get_mut(..len)?;
        let sys::Outcome { sent, received, fds } =
            self.ring.send_and_receive(socket, reply, &fds, scratch)?;
        let fds = fds.into_iter().map(|fd| PeerFd::new(fd, closer)).collect();
        Some(Exchanged { sent, received, fds })
    }
}

#[cfg(test)]
mod tests;
