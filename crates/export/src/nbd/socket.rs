//! Socket of a client: buffered input and readiness, with optional TLS.

use super::sys;
use crate::data::Data;
use crate::io_thread::{FIRST, IoThread, Readiness};
use crate::vectors::{Part, Room};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use shadowbell_tls::{Session, SessionError};
use std::future::Future;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Size of the input buffer, in bytes. Data of long writes is received without it.
pub(super) const INPUT: usize = 128 << 10;
/// Time limit of the handshake.
pub(super) const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a client to receive its last replies when the server ends.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of the socket in the thread's epoll set.
const SOCKET: u64 = FIRST;
const HANG_UP: EventFlags = EventFlags::RDHUP.union(EventFlags::HUP).union(EventFlags::ERR);
const RECEIVE: EventFlags = EventFlags::IN.union(EventFlags::RDHUP);

/// Reason for the end of a connection, other than a disconnect by the client.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    #[error("{0}")]
    Protocol(String),
    #[error("the connection broke: {0}")]
    Socket(Errno),
    #[error("TLS with the client failed: {0}")]
    Tls(SessionError),
    #[error("the client did not complete the handshake within {} s", NEGOTIATION_TIMEOUT.as_secs())]
    Slow,
    #[error("too many clients")]
    TooMany,
    #[error("the client did not receive its replies within {} s", DRAIN_TIMEOUT.as_secs())]
    Stuck,
    #[error(
        "disconnected without replies to its requests, because the disk is stopped by an error"
    )]
    Stopped,
    #[error("the disk failed in the middle of a reply that must not be split")]
    Broken,
    #[error("the disk has no queue for another client: {0}")]
    Queue(std::io::Error),
    #[error("cannot create or watch an event: {0}")]
    Event(#[from] std::io::Error),
}

/// Received bytes that were not processed yet.
pub(super) struct Input {
    bytes: Box<[u8]>,
    from: usize,
    pub(super) to: usize,
}

impl Input {
    pub(super) fn rest(&self) -> &[u8] {
        self.bytes.get(self.from..self.to).unwrap_or_default()
    }

    pub(super) fn consume(&mut self, count: usize) {
        self.from = (self.from + count).min(self.to);
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        }
    }

    /// Free space for more bytes. Moves the unprocessed bytes to the front first.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.from > 0 {
            self.bytes.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        self.bytes.get_mut(self.to..).unwrap_or_default()
    }
}

pub(super) struct ClientSocket {
    fd: OwnedFd,
    tls: Option<Box<Session>>,
    /// Error of the TLS session.
    fault: Option<SessionError>,
    pub(super) input: Input,
    /// True if there may be bytes to receive.
    pub(super) readable: bool,
    /// True if the client has shut down its sending direction. Bytes that it sent before may still
    /// be unread.
    pub(super) closing: bool,
    /// True if the send buffer is full.
    pub(super) blocked: bool,
    /// True if the epoll set also waits for the socket to become writable.
    wakes_to_send: bool,
}

impl ClientSocket {
    /// Adds the socket to the thread's epoll set.
    pub(super) fn new<F: Future>(fd: OwnedFd, io: &IoThread<F>) -> Result<Self, ConnectionError> {
        io.add_fd(fd.as_fd(), SOCKET, RECEIVE).map_err(ConnectionError::Event)?;
        let input = Input { bytes: vec![0; INPUT].into(), from: 0, to: 0 };
        let (tls, fault) = (None, None);
        Ok(Self {
            fd,
            tls,
            fault,
            input,
            readable: true,
            closing: false,
            blocked: false,
            wakes_to_send: false,
        })
    }

    /// Switches the connection to TLS.
    pub(super) fn begin_tls(&mut self, session: Session) {
        self.tls = Some(Box::new(session));
        self.readable = true;
    }

    /// Waits until there is work.
    pub(super) fn wait<F: Future>(
        &mut self,
        io: &mut IoThread<F>,
        until: Option<Instant>,
    ) -> Result<(), ConnectionError> {
        self.review_wakes(io)?;
        let Self { readable, closing, blocked, .. } = self;
        io.wait(until, |(_, flags): Readiness| {
            *readable |= flags.intersects(EventFlags::IN | HANG_UP);
            *closing |= flags.intersects(HANG_UP);
            *blocked &= !flags.intersects(EventFlags::OUT | HANG_UP);
        });
        self.review_wakes(io)
    }

    /// Removes the writable flag from the epoll set when the socket is writable again.
    fn review_wakes<F: Future>(&mut self, io: &IoThread<F>) -> Result<(), ConnectionError> {
        if self.wakes_to_send && !self.blocked {
            self.wakes_to_send = false;
            io.modify_fd(self.fd.as_fd(), SOCKET, RECEIVE).map_err(ConnectionError::Event)?;
        }
        Ok(())
    }

    /// Receives into the free space of the input, without blocking. Returns the number of bytes;
    /// the caller adds it to the input.
    pub(super) fn receive(&mut self) -> Result<usize, Errno> {
        let Self { fd, tls, fault, input, .. } = self;
        match tls {
            None => rustix::io::read(fd, input.room()),
            Some(session) => receive_tls(fd, session, fault, input.room()),
        }
    }

    /// Receives first into the range `from..to` of `data`, and then into the input until it has
    /// `most` bytes. Returns the number of received bytes, and the space that was available in each
    /// of the two.
    pub(super) fn receive_after(
        &mut self,
        data: Option<(&mut Data, usize, usize)>,
        most: usize,
    ) -> (Result<usize, Errno>, usize, usize) {
        let Self { fd, tls, fault, input, .. } = self;
        let more = most.saturating_sub(input.rest().len());
        let room = input.room();
        let more = more.min(room.len());
        let room = room.get_mut(..more).unwrap_or_default();
        let space = room.len();
        match (tls, data) {
            (None, None) => (rustix::io::read(fd, room), 0, space),
            (None, Some((data, from, to))) => {
                let first = data.room(from, to);
                (sys::receive(fd.as_fd(), &first, &Room::of(room)), first.len(), space)
            }
            (Some(session), None) => (receive_tls(fd, session, fault, room), 0, space),
            (Some(session), Some((data, from, to))) => {
                // The data of a TLS client is always in ordinary memory.
                let Data::Own(data) = data else { return (Err(Errno::INVAL), 0, space) };
                let data = data.get_mut(from..to).unwrap_or_default();
                let wanted = data.len();
                let outcome = match receive_tls(fd, session, fault, data) {
                    Ok(count) if count == wanted => {
                        Ok(count + receive_tls(fd, session, fault, room).unwrap_or(0))
                    }
                    outcome => outcome,
                };
                (outcome, wanted, space)
            }
        }
    }

    /// True if the connection uses TLS.
    pub(super) fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// True if TLS has ended. The next receive call reports the end, so the caller has to make that
    /// call although the socket does not become readable again.
    pub(super) fn has_more(&self) -> bool {
        self.tls.as_ref().is_some_and(|session| session.has_ended())
    }

    /// Sends as much as possible without blocking.
    pub(super) fn send(&mut self, parts: &[Part<'_>]) -> Result<usize, Errno> {
        let Self { fd, tls: Some(session), .. } = self else {
            return sys::send(self.fd.as_fd(), parts);
        };
        if !session.flush(&mut Raw(fd)).map_err(errno)? {
            return Err(Errno::AGAIN);
        }
        let mut own = [IoSlice::new(&[]); sys::MAX_VECTORS];
        for (own, part) in own.iter_mut().zip(parts) {
            // The data of a TLS client is always in ordinary memory.
            *own = IoSlice::new(part.own().ok_or(Errno::INVAL)?);
        }
        let own = own.get(..parts.len()).unwrap_or_default();
        let count = session.put(own).map_err(errno)?;
        session.flush(&mut Raw(fd)).map_err(errno)?;
        Ok(count)
    }

    /// True if TLS has pending output.
    pub(super) fn has_pending(&self) -> bool {
        self.tls.as_ref().is_some_and(|session| session.is_pending())
    }

    /// Sends pending output of TLS. Returns true if all was sent.
    pub(super) fn flush(&mut self) -> Result<bool, Errno> {
        let Self { fd, tls: Some(session), .. } = self else { return Ok(true) };
        session.flush(&mut Raw(fd)).map_err(errno)
    }

    /// Sends the TLS close notification.
    pub(super) fn close(&mut self) {
        if let Some(session) = &mut self.tls {
            session.close();
            // If the notification cannot be sent, the client only sees that the connection is
            // closed.
            let _ = session.flush(&mut Raw(&self.fd));
        }
    }

    /// Converts the error number of a call into a connection error.
    pub(super) fn error(&self, errno: Errno) -> ConnectionError {
        match &self.fault {
            Some(fault) => ConnectionError::Tls(fault.clone()),
            None => ConnectionError::Socket(errno),
        }
    }

    /// Records that the send buffer is full, and adds the writable flag to the epoll set.
    pub(super) fn block<F: Future>(&mut self, io: &IoThread<F>) -> Result<(), ConnectionError> {
        self.blocked = true;
        if self.wakes_to_send {
            return Ok(());
        }
        self.wakes_to_send = true;
        let flags = RECEIVE | EventFlags::OUT;
        io.modify_fd(self.fd.as_fd(), SOCKET, flags).map_err(ConnectionError::Event)
    }
}

/// Socket adapter for TLS.
struct Raw<'a>(&'a OwnedFd);

impl Read for Raw<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(self.0, into)?)
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        // MSG_NOSIGNAL is needed, because not every program ignores SIGPIPE.
        let flags = SendFlags::NOSIGNAL;
        Ok(sendmsg(self.0, parts, &mut SendAncillaryBuffer::default(), flags)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn receive_tls(
    fd: &OwnedFd,
    session: &mut Session,
    fault: &mut Option<SessionError>,
    into: &mut [u8],
) -> Result<usize, Errno> {
    session.receive(&mut Raw(fd), into).map_err(|error| {
        if let Some(why) = Session::fault(&error) {
            *fault = Some(why.clone());
            // The session sends an alert to the client, if the socket accepts it.
            let _ = session.flush(&mut Raw(fd));
        }
        errno(error)
    })
}

fn errno(error: io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::PROTO)
}

impl AsFd for ClientSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
