//! A client's socket: what was received and not used, and what it is ready for.

use crate::io_thread::{FIRST, IoThread};
use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use std::future::Future;
use std::io::IoSliceMut;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Bytes that are received at once, apart from the data of writes.
const INPUT: usize = 128 << 10;
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
    #[error("the client did not say what it wants within {} s", NEGOTIATION_TIMEOUT.as_secs())]
    Slow,
    #[error("as many clients are here as may be")]
    TooMany,
    #[error("the client did not take its answers within {} s", DRAIN_TIMEOUT.as_secs())]
    Stuck,
    #[error("the disk failed in the middle of an answer that the client had asked for whole")]
    Broken,
    #[error("the system has no event descriptor left: {0}")]
    Event(std::io::Error),
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
    pub(super) input: Input,
    /// There may be something to receive.
    pub(super) readable: bool,
    /// The client has said that it sends no more; what it sent before may still be there.
    pub(super) closing: bool,
    /// The socket takes no more at the moment.
    pub(super) blocked: bool,
}

impl ClientSocket {
    /// The socket, which wakes the thread from now on.
    pub(super) fn new<F: Future>(fd: OwnedFd, io: &IoThread<F>) -> Result<Self, ConnectionError> {
        io.add_fd(fd.as_fd(), SOCKET, RECEIVE).map_err(ConnectionError::Event)?;
        let input = Input { bytes: vec![0; INPUT].into(), from: 0, to: 0 };
        Ok(Self { fd, input, readable: true, closing: false, blocked: false })
    }

    /// Waits until there is something to do.
    pub(super) fn wait<F: Future>(
        &mut self,
        io: &mut IoThread<F>,
        until: Option<Instant>,
    ) -> Result<(), ConnectionError> {
        let Self { fd, readable, closing, blocked, .. } = self;
        let was_blocked = *blocked;
        io.wait(until, |(_, flags)| {
            *readable |= flags.intersects(EventFlags::IN | HANG_UP);
            *closing |= flags.intersects(HANG_UP);
            *blocked &= !flags.intersects(EventFlags::OUT | HANG_UP);
        });
        if was_blocked && !*blocked {
            io.modify_fd(fd.as_fd(), SOCKET, RECEIVE).map_err(ConnectionError::Event)?;
        }
        Ok(())
    }

    /// Receives what there is room for, without waiting. How much it was; the caller counts it as
    /// input.
    pub(super) fn receive(&mut self) -> Result<usize, Errno> {
        rustix::io::read(&self.fd, self.input.room())
    }

    /// Receives `data` first, and into the input what follows. How much it was, and how much there
    /// was room for in either.
    pub(super) fn receive_after(
        &mut self,
        data: &mut [u8],
    ) -> (Result<usize, Errno>, usize, usize) {
        let room = self.input.room();
        let (wanted, space) = (data.len(), room.len());
        let outcome = if data.is_empty() {
            rustix::io::read(&self.fd, room)
        } else {
            rustix::io::readv(&self.fd, &mut [IoSliceMut::new(data), IoSliceMut::new(room)])
        };
        (outcome, wanted, space)
    }

    /// The socket takes no more: waits for it to do so again.
    pub(super) fn block<F: Future>(&mut self, io: &IoThread<F>) -> Result<(), ConnectionError> {
        self.blocked = true;
        let flags = RECEIVE | EventFlags::OUT;
        io.modify_fd(self.fd.as_fd(), SOCKET, flags).map_err(ConnectionError::Event)
    }
}

impl AsFd for ClientSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
