//! One connection: reads, handles, writes, and knows what its peer has to do until when.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shadowbell_state::{Descriptors, FdRef};

use super::inbox::Request;
use super::limits::Limits;
use super::requests::{Context, Link, SavedLink, Violation};
use crate::Errno;
use crate::codec::{DecodeError, Decoder, SavedDecoder};
use crate::descriptor::{Inspector, Stream};
use crate::device::Device;
use crate::handover::RestoreError;
use crate::shared_socket::PolledWrites;
use crate::socket::{Arrival, Received, receive, receive_some, send_owned, take_in};

/// Messages and receives of one connection before the others get their turn.
const TURN: u32 = 64;

/// Messages and receives that one call of [`Session::poll_writes`] handles.
const POLL: u32 = 16;

/// No requests are looked at while more than this waits to be sent, so that the queue never holds
/// more than this and one reply.
const HIGH_WATER: usize = 64 * 1024;

/// Why a connection ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum EndReason {
    #[error("it left")]
    Left,
    #[error("it left in the middle of a message")]
    LeftHalfway,
    #[error("{0}")]
    Garbage(#[from] DecodeError),
    #[error("{0}")]
    Violation(#[from] Violation),
    #[error("its descriptors could not be received: too many are open in this process")]
    FdsLost,
    #[error("it keeps sending descriptors that take their time to be closed")]
    FdsStuck,
    #[error("its socket failed: {0}")]
    Socket(#[from] Errno),
    #[error("it did not agree on a version in time")]
    NegotiationOverdue,
    #[error("it did not complete a message in time")]
    MessageOverdue,
    #[error("it did not read its replies in time")]
    RepliesUnread,
    #[error("the server lets go of it")]
    Dropped,
}

/// What to do with a connection after its turn.
pub(super) enum Turn {
    /// Nothing, until its socket or its device reports something.
    Wait,
    /// Give it another one soon.
    Again,
    /// Close it.
    End(EndReason),
}

/// What a peer has to do next. The same expectation again does not get a new deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Version,
    /// The rest of the message at this position of the stream.
    Message(u64),
    /// To read on from this position of what was sent.
    Reading(u64),
}

/// A connection.
pub(super) struct Session {
    socket: Stream,
    inspector: Inspector,
    decoder: Decoder,
    /// What [`Session::poll_writes`] received and leaves to the next turn.
    arrival: Option<Arrival>,
    pub(super) link: Link,
    readable: bool,
    hung_up: bool,
    /// The socket is full. The reactor watches for it to drain while this is so.
    pub(super) full: bool,
    sent: u64,
    expected: Option<(Expected, Instant)>,
}

/// A [`Session`] at rest, on its way to another process.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct SavedSession {
    socket: FdRef,
    received: SavedDecoder,
    link: SavedLink,
}

impl Session {
    /// The other side of [`save`](Self::save): [lent](Self::set_lent) for now. `make` puts the
    /// socket in a [`Stream`].
    pub(super) fn restore(
        saved: SavedSession,
        fds: &mut Descriptors,
        make: impl FnOnce(OwnedFd) -> (Stream, Inspector),
        limits: &Limits,
    ) -> Result<Self, RestoreError> {
        let SavedSession { socket, received, link } = saved;
        let link = Link::restore(link, fds)?;
        let (mut socket, inspector) = make(fds.take(socket)?);
        socket.set_lent(true);
        // What was agreed holds, whatever the limits are here.
        let max_data_xfer_size = link.max_xfer().unwrap_or(limits.max_data_xfer_size);
        let mut session = Self::new(socket, inspector, &Limits { max_data_xfer_size, ..*limits });
        let max = usize::try_from(max_data_xfer_size).unwrap_or(usize::MAX);
        let closer = session.inspector.closer();
        session.decoder = Decoder::restore(received, max, fds, closer)?;
        session.link = link;
        Ok(session)
    }

    /// What a successor has to know, of a session at rest.
    pub(super) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedSession> {
        Ok(SavedSession {
            socket: fds.add(self.socket.as_fd().try_clone_to_owned()?),
            received: self.decoder.save(fds)?,
            link: self.link.save(fds)?,
        })
    }

    /// Says whether another process serves the same peer, and goes on if this one does not: then
    /// dropping this does nothing to the peer.
    pub(super) fn set_lent(&mut self, is_lent: bool) {
        self.socket.set_lent(is_lent);
    }

    /// Goes on after a rest, during which nobody counted the time or looked at the socket.
    pub(super) fn wake(&mut self) {
        self.readable = true;
        self.full = false;
        self.expected = None;
    }

    /// Finishes the message in hand, if there is one, and begins no other.
    pub(super) fn rest(&mut self, device: &mut dyn Device, context: &mut Context<'_>) -> Turn {
        self.come_to_rest(device, context).unwrap_or_else(Turn::End)
    }

    /// Nothing is half carried out.
    pub(super) fn is_at_rest(&self) -> bool {
        self.link.is_at_rest() && self.arrival.is_none()
    }

    fn come_to_rest(
        &mut self,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<Turn, EndReason> {
        if self.link.awaits().is_none() {
            self.link.go_on(device, context);
            device.settle();
        }
        // What another thread has received and nobody has looked at is not to be handed on.
        match self.arrival.take().map(|it| take_in(it, &mut self.decoder, &self.inspector)) {
            Some(Received::Closed) => return Err(EndReason::Left),
            Some(Received::FdsLost) => return Err(EndReason::FdsLost),
            Some(Received::Bytes { .. }) | None => {}
        }
        self.flush()?;
        Ok(if self.link.is_unfinished() { Turn::Again } else { Turn::Wait })
    }

    pub(super) fn new(socket: Stream, inspector: Inspector, limits: &Limits) -> Self {
        let max = usize::try_from(limits.max_data_xfer_size).unwrap_or(usize::MAX);
        Self {
            socket,
            inspector,
            decoder: Decoder::new(max),
            arrival: None,
            link: Link::default(),
            // Its first message may well be there already.
            readable: true,
            hung_up: false,
            full: false,
            sent: 0,
            expected: Some((Expected::Version, Instant::now() + limits.negotiation)),
        }
    }

    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// The socket reported something.
    pub(super) fn notify(&mut self, readable: bool, writable: bool, hung_up: bool) {
        self.readable |= readable || hung_up;
        self.hung_up |= hung_up;
        if writable || hung_up {
            self.full = false;
        }
    }

    /// When the peer's time is up, if something is expected of it.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.expected.map(|(_, until)| until)
    }

    /// Why the connection ends now that the time is up.
    pub(super) fn overdue(&self) -> EndReason {
        match self.expected {
            Some((Expected::Message(_), _)) => EndReason::MessageOverdue,
            Some((Expected::Reading(_), _)) => EndReason::RepliesUnread,
            _ => EndReason::NegotiationOverdue,
        }
    }

    /// Does what there is to do, up to a limit.
    pub(super) fn turn(&mut self, device: &mut dyn Device, context: &mut Context<'_>) -> Turn {
        match self.work(device, context) {
            Ok(turn) => {
                self.set_deadline(context.limits);
                turn
            }
            Err(ended) => Turn::End(ended),
        }
    }

    fn work(
        &mut self,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<Turn, EndReason> {
        let mut left = TURN;
        loop {
            let outcome = self.handle_all(&mut left, device, context);
            device.settle();
            // Also an error reply is worth sending before the end.
            self.flush()?;
            let emptied = outcome?;
            if self.link.awaits().is_some() || self.link.out.len() > HIGH_WATER {
                return Ok(Turn::Wait);
            }
            if left == 0 || self.link.is_unfinished() || context.slice.is_over() {
                return Ok(Turn::Again);
            }
            if !emptied {
                continue;
            }
            if !self.readable {
                return Ok(Turn::Wait);
            }
            left -= 1;
            let (inbox, port) = (Arc::clone(context.inbox), context.port);
            if self.inspector.closer().is_full(move || inbox.push(Request::Turn { port })) {
                return Ok(Turn::Wait);
            }
            let (decoder, inspector) = (&mut self.decoder, &self.inspector);
            let received = match self.arrival.take() {
                Some(arrival) => Ok(take_in(arrival, decoder, inspector)),
                None => receive(self.socket.as_fd(), decoder, inspector),
            };
            if self.inspector.closer().is_overloaded() {
                return Err(EndReason::FdsStuck);
            }
            match received {
                // A hang-up is announced only once: then read on until it shows.
                Ok(Received::Bytes { drained }) => self.readable = !drained || self.hung_up,
                Ok(Received::Closed) if self.decoder.is_partial() => {
                    return Err(EndReason::LeftHalfway);
                }
                Ok(Received::Closed) => return Err(EndReason::Left),
                Ok(Received::FdsLost) => return Err(EndReason::FdsLost),
                Err(Errno::AGAIN) => self.readable = false,
                Err(Errno::CONNRESET) => return Err(EndReason::Left),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Nothing is half received, half sent or awaited.
    pub(super) fn is_idle(&self) -> bool {
        let moving = self.readable || self.hung_up || self.full || self.arrival.is_some();
        !moving && self.expected.is_none() && self.link.is_idle() && !self.decoder.is_partial()
    }

    /// Takes what comes in as far as it is nothing but writes that `write` takes, on a thread that
    /// is not the reactor's. What else there is stays, for a [turn](Self::turn).
    pub(super) fn poll_writes(
        &mut self,
        write: &mut dyn FnMut(u32, u64, &[u8]) -> bool,
    ) -> PolledWrites {
        if self.arrival.is_some() {
            // What an earlier call has left to the reactor comes first.
            return PolledWrites { writes: 0, all: false };
        }
        let (mut writes, mut drained) = (0, false);
        for _ in 0..POLL {
            if let Some((header, payload)) = self.decoder.peek() {
                if !self.link.handle_write(&header, payload, write) {
                    break;
                }
                writes += 1;
                // It is that one, and good.
                let _ = self.decoder.decode();
            } else if self.decoder.is_partial() || drained {
                break;
            } else {
                let closer = self.inspector.closer();
                match receive_some(self.socket.as_fd(), self.decoder.space(), closer) {
                    Ok(arrival) if arrival.is_plain() => {
                        drained = arrival.is_short;
                        self.decoder.advance(arrival.bytes, Vec::new());
                    }
                    Ok(arrival) => {
                        self.arrival = Some(arrival);
                        break;
                    }
                    Err(errno) => {
                        drained = errno == Errno::AGAIN;
                        break;
                    }
                }
            }
        }
        // Whatever this comes to, it comes to it again in a turn.
        let sent = self.flush().is_ok() && self.link.out.is_empty();
        let all = drained && sent && self.arrival.is_none() && !self.decoder.is_partial();
        PolledWrites { writes, all }
    }

    /// Handles messages; true if no whole one is left.
    fn handle_all(
        &mut self,
        left: &mut u32,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<bool, EndReason> {
        while *left > 0 && self.link.awaits().is_none() && self.link.out.len() <= HIGH_WATER {
            if self.link.is_unfinished() {
                self.link.go_on(device, context);
                if self.link.is_unfinished() {
                    return Ok(false);
                }
                continue;
            }
            let Some(message) = self.decoder.decode()? else { return Ok(true) };
            *left -= 1;
            self.link.handle(message, device, context)?;
            if context.slice.is_over() {
                return Ok(false);
            }
        }
        Ok(false)
    }

    fn flush(&mut self) -> Result<(), EndReason> {
        while !self.full && !self.link.out.is_empty() {
            let (bytes, fds) = self.link.out.front();
            match send_owned(self.socket.as_fd(), bytes, fds) {
                Ok(len) => {
                    self.link.out.sent(len);
                    self.sent += len as u64;
                }
                Err(Errno::AGAIN) => self.full = true,
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(EndReason::Left),
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn set_deadline(&mut self, limits: &Limits) {
        let (expected, time) = if !self.link.out.is_empty() {
            (Expected::Reading(self.sent), limits.unread_replies)
        } else if !self.link.is_agreed() {
            (Expected::Version, limits.negotiation)
        } else if self.link.awaits().is_none() && !self.readable && self.decoder.is_partial() {
            (Expected::Message(self.decoder.position()), limits.message)
        } else {
            self.expected = None;
            return;
        };
        if self.expected.is_none_or(|(known, _)| known != expected) {
            self.expected = Some((expected, Instant::now() + time));
        }
    }
}
