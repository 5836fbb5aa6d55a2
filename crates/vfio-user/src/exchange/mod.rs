//! A reply and the end of its request, in one step.
//!
//! A message that is recorded stays in its socket until it was carried out. Then its reply is sent,
//! and it is taken out. A process that is killed between these two has done one of them, and the
//! next one can not find out which: it would send the reply twice, or never. So one system call does
//! both: io_uring carries out what it is handed before the call returns, if that need not wait, and
//! nothing ends a process inside of it.

mod sys;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use crate::Errno;
use crate::descriptor::{Closer, PeerFd};

/// Sends and takes out together.
#[derive(Debug)]
pub(crate) struct Exchange {
    ring: sys::Ring,
    /// Where what is taken out goes: nobody looks at it.
    scratch: Vec<u8>,
}

/// What one step came to.
#[derive(Debug)]
pub(crate) struct Exchanged {
    /// How many bytes of the reply were sent.
    pub(crate) sent: Result<usize, Errno>,
    /// How many bytes were taken out.
    pub(crate) taken: Result<usize, Errno>,
    /// The descriptors that were with them, once more.
    pub(crate) fds: Vec<PeerFd>,
}

impl Exchange {
    /// # Errors
    ///
    /// The system does not let this process have a ring, or not now.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { ring: sys::Ring::new()?, scratch: Vec::new() })
    }

    /// Sends as much of `reply` as the socket takes, with `fds`, and takes `len` bytes out of it,
    /// which are there. `None` if the system had no memory for it: then neither was done.
    pub(crate) fn answer_and_take<'a>(
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
        let sys::Outcome { sent, taken, fds } = self.ring.both(socket, reply, &fds, scratch)?;
        let fds = fds.into_iter().map(|fd| PeerFd::new(fd, closer)).collect();
        Some(Exchanged { sent, taken, fds })
    }
}

#[cfg(test)]
mod tests;
