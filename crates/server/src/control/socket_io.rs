//! Client connection for hyper that needs only the system calls `read` and `write`. tokio's own
//! streams use further system calls, each of which the sandbox would have to allow.
//!
//! A client of the control socket can pass a descriptor with a request. Only this module receives
//! these descriptors.

use anyhow::anyhow;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown, recvmsg};
use shadowbell_process::{deferred_close, exit};
use shadowbell_supervisor::protocol::MAX_FDS;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::{TcpStream, UnixStream};

/// Device number of `/dev/fuse`.
const FUSE: (u32, u32) = (10, 229);

/// Last descriptor that a client has passed, shared with its requests.
pub(super) type ReceivedDescriptor = Arc<Mutex<PassedDescriptor>>;

/// Descriptor that a client has passed, if there is one. Another thread closes it, because the
/// close may block.
#[derive(Default)]
pub(super) struct PassedDescriptor(Option<OwnedFd>);

impl PassedDescriptor {
    /// Takes a descriptor of `/dev/fuse`.
    ///
    /// # Errors
    /// The passed descriptor is not one of `/dev/fuse`.
    pub(super) fn take_fuse_device(&mut self) -> anyhow::Result<Option<OwnedFd>> {
        let Some(device) = &self.0 else { return Ok(None) };
        // The flags prevent a request to the descriptor's file system, which may not answer.
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let about = statx(device, "", flags, StatxFlags::TYPE)?;
        match (about.stx_rdev_major, about.stx_rdev_minor) {
            FUSE => Ok(self.0.take()),
            _ => Err(exit::bad_input(anyhow!("the passed descriptor is not one of /dev/fuse"))),
        }
    }
}

impl Drop for PassedDescriptor {
    fn drop(&mut self) {
        deferred_close::defer(self.0.take());
    }
}

/// A client connection.
pub(super) struct ClientSocket {
    stream: Arc<Stream>,
    is_sending: Arc<AtomicBool>,
    /// True if bytes from the client were read.
    has_read: Arc<AtomicBool>,
    /// True if the descriptor was duplicated for another process, which may serve the client. What
    /// the client sends is then left for that process.
    is_duplicated: Arc<AtomicBool>,
    received: ReceivedDescriptor,
}

/// Descriptor of a client connection, independent of the connection's owner.
pub(super) struct ClientDescriptor {
    stream: Arc<Stream>,
    has_read: Arc<AtomicBool>,
    is_duplicated: Arc<AtomicBool>,
}

impl ClientDescriptor {
    /// True if no byte from the client was read, so that another process can serve the client.
    pub(super) fn is_untouched(&self) -> bool {
        !self.has_read.load(Ordering::SeqCst)
    }

    /// Duplicates the descriptor.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.is_duplicated.store(true, Ordering::SeqCst);
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
        let (is_sending, has_read, is_duplicated, received) = Default::default();
        Self { stream: Arc::new(stream), is_sending, has_read, is_duplicated, received }
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
    /// Flag that is true while response bytes wait until the client reads.
    pub(super) fn is_sending(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.is_sending)
    }

    /// Shared slot for the descriptor that the client passes.
    pub(super) fn received(&self) -> ReceivedDescriptor {
        Arc::clone(&self.received)
    }

    /// Descriptor of the connection.
    pub(super) fn descriptor(&self) -> ClientDescriptor {
        let (stream, has_read) = (Arc::clone(&self.stream), Arc::clone(&self.has_read));
        ClientDescriptor { stream, has_read, is_duplicated: Arc::clone(&self.is_duplicated) }
    }

    fn poll_ready(&self, context: &mut Context<'_>, interest: Interest) -> Poll<io::Result<()>> {
        match &*self.stream {
            Stream::Unix(socket) if interest.is_readable() => socket.poll_read_ready(context),
            Stream::Unix(socket) => socket.poll_write_ready(context),
            Stream::Tcp(socket) if interest.is_readable() => socket.poll_read_ready(context),
            Stream::Tcp(socket) => socket.poll_write_ready(context),
        }
    }

    /// Performs `call` when the socket is ready for it.
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

/// Receives the remaining bytes and descriptors, so that the close of the socket does not close
/// these descriptors on this thread.
impl Drop for ClientSocket {
    fn drop(&mut self) {
        if let Stream::Unix(socket) = &*self.stream
            && !self.is_duplicated.load(Ordering::SeqCst)
        {
            let _ = rustix::net::shutdown(socket, Shutdown::Read);
            let mut rest = [0; 4096];
            while receive(socket.as_fd(), &mut rest, &self.received).is_ok_and(|len| len > 0) {}
        }
    }
}

/// Receives bytes, and keeps the first descriptor that comes with them.
fn receive(
    socket: BorrowedFd<'_>,
    room: &mut [u8],
    received: &ReceivedDescriptor,
) -> rustix::io::Result<usize> {
    // There is room for all descriptors, because the kernel would close further ones on this
    // thread.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut room = [IoSliceMut::new(room)];
    let bytes = recvmsg(socket, &mut room, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            deferred_close::defer(std::mem::replace(&mut received.lock().0, fds.next()));
            deferred_close::defer(fds);
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

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::{
        set_socket_linger, set_socket_recv_buffer_size, set_socket_send_buffer_size,
    };
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use shadowbell_testing::wait::{LIMIT, until};
    use std::io::{IoSlice, Write};
    use std::net::{TcpListener, TcpStream as TcpSocket};

    /// Socket whose close blocks (SO_LINGER) until the peer, which does not read, is dropped.
    fn slow() -> (OwnedFd, TcpSocket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        set_socket_recv_buffer_size(&listener, 4096).unwrap();
        let mut writer = TcpSocket::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        set_socket_send_buffer_size(&writer, 4096).unwrap();
        writer.set_nonblocking(true).unwrap();
        while writer.write(&[0; 65536]).is_ok() {}
        writer.set_nonblocking(false).unwrap();
        set_socket_linger(&writer, Some(10 * LIMIT)).unwrap();
        (writer.into(), reader)
    }

    fn pass(socket: &impl AsFd, fds: &[OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [IoSlice::new(b"x")];
        sendmsg(socket, &bytes, &mut control, SendFlags::empty()).unwrap();
    }

    /// A client passes descriptors that are slow to close: a descriptor that is replaced by the
    /// next one, two descriptors in one message, and a descriptor that the server never receives.
    #[test]
    fn a_slow_close_of_a_clients_descriptor_does_not_block_the_server() {
        let (client, server) = std::os::unix::net::UnixStream::pair().unwrap();
        server.set_nonblocking(true).unwrap();
        let (mut slow, readers): (Vec<_>, Vec<_>) = (0..4).map(|_| slow()).unzip();
        pass(&client, &slow.split_off(3));
        pass(&client, &slow.split_off(1));
        pass(&client, &slow);
        drop(slow);
        let serves = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
            let _runtime = runtime.enter();
            let socket = ClientSocket::from(UnixStream::from_std(server).unwrap());
            let received = socket.received();
            for _ in 0..2 {
                receive(socket.as_fd(), &mut [0; 1], &received).unwrap();
            }
            assert!(received.lock().take_fuse_device().is_err(), "it is a socket");
            drop((socket, received));
        });
        until("no close blocks", || serves.is_finished());
        serves.join().unwrap();
        drop(readers);
    }
}
