//! Socket of a peer that uses another protocol than vfio-user.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::closer::{Closer, Stream};
use super::inspector::{Descriptor, Inspector};
use crate::socket::receive_some;

/// Connected socket for other protocols than vfio-user. It inspects received descriptors. Closing
/// it never blocks, whatever the peer has sent.
#[derive(Debug)]
pub struct Channel {
    socket: Stream,
    inspector: Inspector,
}

impl Channel {
    /// Creates a channel on `socket`. `closer` closes the descriptors whose close may block.
    pub fn new(socket: OwnedFd, closer: Arc<Closer>) -> Self {
        Self {
            socket: Stream::new(socket, Arc::clone(&closer)),
            inspector: Inspector::new(closer, Arc::default()),
        }
    }

    /// Receives bytes and their descriptors. 0 bytes mean the end of the stream.
    ///
    /// # Errors
    ///
    /// The error of the socket. `EMFILE` if descriptors were lost because this process has too many
    /// open files.
    pub fn receive(&mut self, into: &mut [u8]) -> Result<(usize, Vec<Descriptor>), Errno> {
        let output = receive_some(self.socket.as_fd(), into, self.inspector.closer())?;
        let fds = self.inspector.inspect_files(output.fds);
        if output.fds_lost {
            return Err(Errno::MFILE);
        }
        Ok((output.bytes, fds))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
