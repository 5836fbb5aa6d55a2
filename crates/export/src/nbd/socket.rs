//! A client's socket: what was received and not used, and what it is ready for.

use super::sys;
use crate::data::Data;
use crate::io_thread::{FIRST, IoThread, Readiness};
use crate::queue_server::QueueServer;
use crate::vectors::{Part, Room};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use shadowbell_tls::{Session, SessionError};
use std::future::Future;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Bytes that are received at once, apart from the data of writes.
pub(super) const INPUT: usize = 128 << 10;
/// How long a client may take to say what it wants.
pub(super) const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a client may take to take its last answers, when the server ends.
pub(super) const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// The socket's number in the thread's epoll set.
const SOCKET: u64 = FIRST;
const HANG_UP: EventFlags = EventFlags::RDHUP.union(EventFlags::HUP).union(EventFlags::ERR);
const RECEIVE: EventFlags = EventFlags::IN.union(EventFlags::RDHUP);

/// Why a connection ended otherwise than by the client's wish.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    #[error("{0}")]
    Protocol(String),
    #[error("the connection broke: {0}")]
    Socket(Errno),
    #[error("no TLS with the client: {0}")]
    Tls(SessionError),
    #[error("the client did not say what it wants within {} s", NEGOTIATION_TIMEOUT.as_secs())]
    Slow,
    #[error("as many clients are here as may be")]
    TooMany,
    #[error("the client did not take its answers within {} s", DRAIN_TIMEOUT.as_secs())]
    Stuck,
    #[error("the disk failed in the middle of an answer that the client had asked for whole")]
    Broken,
    #[error("the system has no event descriptor left: {0}")]
    Event(#[from] std::io::Error),
}

/// Bytes that were received and not used.
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

    /// Room for more.
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
    /// What is wrong with it.
    fault: Option<SessionError>,
    pub(super) input: Input,
    /// There may be something to receive.
    pub(super) readable: bool,
    /// The client has said that it sends no more; what it sent before may still be there.
    pub(super) closing: bool,
    /// The socket takes no more at the moment.
    pub(super) blocked: bool,
    /// The thread is woken when it does.
    wakes_to_send: bool,
}

impl ClientSocket {
    /// The socket, which wakes the thread from now on.
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

    /// What is sent and received from now on goes through TLS.
    pub(super) fn begin_tls(&mut self, session: Session) {
        self.tls = Some(Box::new(session));
        self.readable = true;
    }

    /// Waits until there is something to do.
    pub(super) fn wait<F: Future>(
        &mut self,
        io: &mut IoThread<F>,
        server: Option<&mut (dyn QueueServer + '_)>,
        until: Option<Instant>,
    ) -> Result<(), ConnectionError> {
        self.review_wakes(io)?;
        let Self { readable, closing, blocked, .. } = self;
        let ready = |(_, flags): Readiness| {
            *readable |= flags.intersects(EventFlags::IN | HANG_UP);
            *closing |= flags.intersects(HANG_UP);
            *blocked &= !flags.intersects(EventFlags::OUT | HANG_UP);
        };
        match server {
            Some(server) => io.wait_serving(server, until, ready),
            None => io.wait(until, ready),
        }
        self.review_wakes(io)
    }

    /// The thread is not woken any more when the socket takes more, if it is known to.
    fn review_wakes<F: Future>(&mut self, io: &IoThread<F>) -> Result<(), ConnectionError> {
        if self.wakes_to_send && !self.blocked {
            self.wakes_to_send = false;
            io.modify_fd(self.fd.as_fd(), SOCKET, RECEIVE).map_err(ConnectionError::Event)?;
        }
        Ok(())
    }

    /// Receives what there is room for, without waiting. How much it was; the caller counts it as
    /// input.
    pub(super) fn receive(&mut self) -> Result<usize, Errno> {
        let Self { fd, tls, fault, input, .. } = self;
        match tls {
            None => rustix::io::read(fd, input.room()),
            Some(session) => receive_tls(fd, session, fault, input.room()),
        }
    }

    /// Receives the bytes of `data` from `from` to `to` first, and then into the input what
    /// follows, until that has `most` bytes. How much it was, and how much there was room for in
    /// either.
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
                // Its data are never in memory that the controller can reach.
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

    /// Whether what is sent and received goes through TLS.
    pub(super) fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Whether there is something to receive of which the socket will not say so again.
    pub(super) fn has_more(&self) -> bool {
        self.tls.as_ref().is_some_and(|session| session.has_ended())
    }

    /// Sends as much as can be sent without waiting.
    pub(super) fn send(&mut self, parts: &[Part<'_>]) -> Result<usize, Errno> {
        let Self { fd, tls: Some(session), .. } = self else {
            return sys::send(self.fd.as_fd(), parts);
        };
        if !session.flush(&mut Raw(fd)).map_err(errno)? {
            return Err(Errno::AGAIN);
        }
        let mut own = [IoSlice::new(&[]); sys::MOST];
        for (own, part) in own.iter_mut().zip(parts) {
            // Its data are never in memory that the controller can reach.
            *own = IoSlice::new(part.own().ok_or(Errno::INVAL)?);
        }
        let own = own.get(..parts.len()).unwrap_or_default();
        let count = session.put(own).map_err(errno)?;
        session.flush(&mut Raw(fd)).map_err(errno)?;
        Ok(count)
    }

    /// Whether something that was sent has not gone out.
    pub(super) fn has_pending(&self) -> bool {
        self.tls.as_ref().is_some_and(|session| session.is_pending())
    }

    /// Has go out what can go out. Whether that is all.
    pub(super) fn flush(&mut self) -> Result<bool, Errno> {
        let Self { fd, tls: Some(session), .. } = self else { return Ok(true) };
        session.flush(&mut Raw(fd)).map_err(errno)
    }

    /// Takes leave.
    pub(super) fn close(&mut self) {
        if let Some(session) = &mut self.tls {
            session.close();
            // Who does not take it sees the end of the connection.
            let _ = session.flush(&mut Raw(&self.fd));
        }
    }

    /// What the error of a call means.
    pub(super) fn error(&self, errno: Errno) -> ConnectionError {
        match &self.fault {
            Some(fault) => ConnectionError::Tls(fault.clone()),
            None => ConnectionError::Socket(errno),
        }
    }

    /// The socket takes no more: waits for it to do so again.
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

/// A socket as TLS uses it.
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
        // Not every program ignores SIGPIPE.
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
            // The client is told, if it takes it.
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
