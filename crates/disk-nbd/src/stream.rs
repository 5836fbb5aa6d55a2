//! Non-blocking socket to a server.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recvmsg, sendmsg,
    shutdown,
};
use shadowbell_memory::EventFd;
use shadowbell_nbd::wire::{Request, command};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// Non-blocking socket.
#[derive(Clone, Debug)]
pub(crate) struct Stream(Arc<OwnedFd>);

impl Stream {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self(Arc::new(socket))
    }

    /// Sends as much as the socket buffer takes.
    pub(crate) fn send(&self, parts: &[IoSlice<'_>]) -> Result<usize, Errno> {
        // The flag prevents SIGPIPE, which the process does not necessarily ignore.
        let flags = SendFlags::NOSIGNAL;
        retry(|| sendmsg(&self.0, parts, &mut SendAncillaryBuffer::default(), flags))
    }

    /// Receives into `first`, then into `rest`. Returns 0 if the connection has ended.
    pub(crate) fn receive(&self, first: &mut [u8], rest: &mut [u8]) -> Result<usize, Errno> {
        let mut parts = [IoSliceMut::new(first), IoSliceMut::new(rest)];
        // The sandbox permits no other system call that receives.
        retry(|| {
            let mut control = RecvAncillaryBuffer::default();
            Ok(recvmsg(&self.0, &mut parts, &mut control, RecvFlags::empty())?.bytes)
        })
    }

    /// Requests the end of the connection (NBD_CMD_DISC). A server that does not receive this
    /// request sees the end of the connection anyway.
    pub(crate) fn send_disconnect(&self) {
        let (flags, offset) = (0, 0);
        let disconnect = Request { flags, command: command::DISC, cookie: 0, offset, len: 0 };
        let _ = self.send(&[IoSlice::new(&disconnect.encode())]);
    }

    /// Shuts the connection down, for all users of the socket.
    pub(crate) fn shut_down(&self) {
        // Fails harmlessly if the connection has ended already.
        let _ = shutdown(&self.0, Shutdown::Both);
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            outcome => return outcome,
        }
    }
}

/// Blocking access to a connection, with a deadline and a stop signal. Not for I/O threads.
pub(crate) struct Patient<'a> {
    pub(crate) stream: &'a Stream,
    pub(crate) until: Instant,
    /// Readable when the operation is to be aborted.
    pub(crate) stop: &'a EventFd,
}

impl Patient<'_> {
    fn wait(&self, what: PollFlags) -> io::Result<()> {
        wait(self.stream.as_fd(), what, self.until, self.stop)
    }
}

/// Waits until `fd` is ready, the deadline expires, or `stop` is readable.
pub(crate) fn wait(
    fd: BorrowedFd<'_>,
    what: PollFlags,
    until: Instant,
    stop: &EventFd,
) -> io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut fds = [
            PollFd::from_borrowed_fd(fd, what),
            PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
        ];
        match poll(&mut fds, Some(&left)) {
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno.into()),
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => {}
        }
        let [fd, stop] = &fds;
        if !stop.revents().is_empty() {
            // The error is not `Interrupted`, because the caller would repeat the call.
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if !fd.revents().is_empty() {
            return Ok(());
        }
    }
}

impl Read for Patient<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            match self.stream.receive(&mut [], into) {
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                outcome => return Ok(outcome?),
            }
        }
    }
}

impl Write for Patient<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        loop {
            match self.stream.send(&[IoSlice::new(from)]) {
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                outcome => return Ok(outcome?),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
