//! A socket of a peer that speaks another protocol.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::closer::{Closer, Stream};
use super::inspector::{Descriptor, Inspector};
use crate::socket::receive_some;

/// A connected socket whose descriptors are looked at as they arrive, for a protocol other than
/// vfio-user. Closing it waits for nobody, whatever its peer has sent.
#[derive(Debug)]
pub struct Channel {
    socket: Stream,
    inspector: Inspector,
}

impl Channel {
    /// Receives from `socket`; what is not to be waited for is left to `closer`.
    pub fn new(socket: OwnedFd, closer: Arc<Closer>) -> Self {
        Self {
            socket: Stream::new(socket, Arc::clone(&closer)),
            inspector: Inspector::new(closer, Arc::default()),
        }
    }

    /// Receives some bytes, and the descriptors that came with them; no bytes are the end.
    ///
    /// # Errors
    ///
    /// The socket's. `EMFILE` if descriptors were lost because this process has too many open.
    pub fn receive(&mut self, into: &mut [u8]) -> Result<(usize, Vec<Descriptor>), Errno> {
        let arrival = receive_some(self.socket.as_fd(), into, self.inspector.closer())?;
        let fds = self.inspector.inspect_files(arrival.fds);
        if arrival.fds_lost {
            return Err(Errno::MFILE);
        }
        Ok((arrival.bytes, fds))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
