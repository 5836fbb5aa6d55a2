//! A socket of a peer that speaks another protocol.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

use super::{Closer, Descriptor, Entrance, Stream};
use crate::socket::SCM_MAX_FD;

/// A connected socket whose descriptors are looked at as they arrive, for a protocol other than
/// vfio-user. Closing it waits for nobody, whatever its peer has sent.
#[derive(Debug)]
pub struct Channel {
    socket: Stream,
    entrance: Entrance,
}

impl Channel {
    /// Receives from `socket`; what is not to be waited for is left to `closer`.
    pub fn new(socket: OwnedFd, closer: Arc<Closer>) -> Self {
        Self { socket: Stream::new(socket, Arc::clone(&closer)), entrance: Entrance::new(closer) }
    }

    /// Receives some bytes, and the descriptors that came with them; no bytes are the end.
    ///
    /// # Errors
    ///
    /// The socket's. `EMFILE` if descriptors were lost because this process has too many open.
    pub fn receive(&mut self, into: &mut [u8]) -> Result<(usize, Vec<Descriptor>), Errno> {
        // Room for all that the kernel lets through at once: what it has to leave out, it closes here.
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(SCM_MAX_FD))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut buffers = [IoSliceMut::new(into)];
        let received = loop {
            match recvmsg(&self.socket, &mut buffers, &mut control, RecvFlags::CMSG_CLOEXEC) {
                Err(Errno::INTR) => continue,
                other => break other?,
            }
        };
        let mut fds: Vec<OwnedFd> = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        let fds = self.entrance.admit_files(fds);
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Errno::MFILE);
        }
        Ok((received.bytes, fds))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
