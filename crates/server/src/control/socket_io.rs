//! Client connection for hyper that needs only the system calls `read` and `write`. tokio's own
//! streams use further system calls, each of which the sandbox would have to allow.
//!
//! A client of the control socket can pass a descriptor with a request. This is the only place that
//! receives one.

use parking_lot::Mutex;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown, recvmsg};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// Last descriptor that a client has passed.
pub(super) type ReceivedDescriptor = Arc<Mutex<Option<OwnedFd>>>;

/// A client connection.
pub(super) struct ClientSocket {
    stream: Arc<Stream>,
    is_sending: Arc<AtomicBool>,
    /// True if bytes of the client were read.
    has_read: Arc<AtomicBool>,
    received: ReceivedDescriptor,
}

/// Descriptor of a client connection, independent of the connection's owner.
pub(super) struct ClientDescriptor {
    stream: Arc<Stream>,
    has_read: Arc<AtomicBool>,
}

impl ClientDescriptor {
    /// True if no byte of the client was read, so that another process can serve it.
    pub(super) fn is_untouched(&self) -> bool {
        !self.has_read.load(Ordering::SeqCst)
    }

    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.stream.as_fd().try_clone_to_owned()
    }
}

enum Stream {
    Unix(UnixStream),
    Tcp(TcpStream),
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(socket) => socket.as_fd(),
            Self::Tcp(socket) => socket.as_fd(),
        }
    }
}

impl From<Stream> for ClientSocket {
    fn from(stream: Stream) -> Self {
        let (is_sending, has_read, received) = Default::default();
        Self { stream: Arc::new(stream), is_sending, has_read, received }
    }
}

impl From<UnixStream> for ClientSocket {
    fn from(stream: UnixStream) -> Self {
        Stream::Unix(stream).into()
    }
}

impl From<TcpStream> for ClientSocket {
    fn from(stream: TcpStream) -> Self {
        Stream::Tcp(stream).into()
    }
}

impl ClientSocket {
    /// Flag that is true while bytes wait until the client reads.
    pub(super) fn is_sending(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_sending)
    }

    /// Descriptor that the client has passed, once there is one.
    pub(super) fn received(&self) -> ReceivedDescriptor {
        Arc::clone(&self.received)
    }

    /// Descriptor of the connection.
    pub(super) fn descriptor(&self) -> ClientDescriptor {
        let (stream, has_read) = (Arc::clone(&self.stream), Arc::clone(&self.has_read));
        ClientDescriptor { stream, has_read }
    }

    fn poll_ready(&self, context: &mut Context<'_>, interest: Interest) -> Poll<io::Result<()>> {
        match &*self.stream {
            Stream::Unix(socket) if interest.is_readable() => socket.poll_read_ready(context),
            Stream::Unix(socket) => socket.poll_write_ready(context),
            Stream::Tcp(socket) if interest.is_readable() => socket.poll_read_ready(context),
            Stream::Tcp(socket) => socket.poll_write_ready(context),
        }
    }

    /// Performs `call` once it does not block.
    fn poll_call(
        &self,
        context: &mut Context<'_>,
        interest: Interest,
        mut call: impl FnMut(BorrowedFd<'_>) -> rustix::io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.poll_ready(context, interest))?;
            let call = || Ok(rustix::io::retry_on_intr(|| call(self.as_fd()))?);
            let outcome = match &*self.stream {
                Stream::Unix(socket) => socket.try_io(interest, call),
                Stream::Tcp(socket) => socket.try_io(interest, call),
            };
            match outcome {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return Poll::Ready(outcome),
            }
        }
    }
}

impl AsFd for ClientSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl AsyncRead for ClientSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let room = into.initialize_unfilled();
        let read = |socket: BorrowedFd<'_>| match &*self.stream {
            Stream::Unix(_) => receive(socket, room, &self.received),
            Stream::Tcp(_) => rustix::io::read(socket, &mut *room),
        };
        let len = ready!(self.poll_call(context, Interest::READABLE, read))?;
        self.has_read.store(true, Ordering::SeqCst);
        into.advance(len);
        Poll::Ready(Ok(()))
    }
}

/// Receives bytes, and a descriptor if one comes with them.
fn receive(
    socket: BorrowedFd<'_>,
    room: &mut [u8],
    received: &ReceivedDescriptor,
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut room = [IoSliceMut::new(room)];
    let bytes = recvmsg(socket, &mut room, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            *received.lock() = fds.next();
        }
    }
    Ok(bytes)
}

impl AsyncWrite for ClientSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let write = |socket: BorrowedFd<'_>| rustix::io::write(socket, bytes);
        let outcome = self.poll_call(context, Interest::WRITABLE, write);
        self.is_sending.store(outcome.is_pending(), Ordering::SeqCst);
        outcome
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(rustix::net::shutdown(self.as_fd(), Shutdown::Write)?))
    }
}
