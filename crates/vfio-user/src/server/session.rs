//! One connection: reads, handles, writes, and knows what its peer has to do until when.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use shadowbell_state::{AbortPoint, Descriptors, abort_point};

use super::inbox::Request;
use super::limits::Limits;
use super::requests::{Link, Violation};
use super::saved::{Handled, SavedSession};
use super::turn::Context;
use crate::Errno;
use crate::codec::{DecodeError, Decoder, SavedDecoder, SendQueue};
use crate::descriptor::{Inspector, Stream};
use crate::device::Device;
use crate::exchange::{Exchange, Exchanged};
use crate::handover::{RestoreError, SaveError};
use crate::shared_socket::PolledWrites;
use crate::socket::{
    Arrival, Received, discard, peek_from, peek_some, receive, receive_some, send_owned, take_in,
};

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
    /// What the peer does is recorded.
    intake: Option<Intake>,
}

/// How a session that is recorded takes in messages: they stay in the socket until what they have
/// brought about is recorded. So what a process that dies has not recorded is still there.
#[derive(Debug)]
struct Intake {
    /// The decoder's position up to which the socket was emptied.
    consumed: u64,
    /// A process that is dead has carried out what it is in the socket's next bytes, if these are
    /// them; what it had to send is in the link's queue then.
    pending: Option<Handled>,
}

/// Records a session and the device's state, with the descriptors that both name.
pub(super) type Record<'a> =
    &'a mut dyn FnMut(Result<(SavedSession, serde_json::Value), SaveError>, Descriptors);

impl Session {
    /// The other side of [`save`](Self::save): [lent](Self::set_lent) for now. `make` puts the
    /// socket in a [`Stream`].
    pub(super) fn restore(
        saved: SavedSession,
        fds: &mut Descriptors,
        make: impl FnOnce(OwnedFd) -> (Stream, Inspector),
        limits: &Limits,
    ) -> Result<Self, RestoreError> {
        let SavedSession { socket, received, link, recorded, handled } = saved;
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
        session.intake = recorded.then_some(Intake { consumed: 0, pending: handled });
        Ok(session)
    }

    /// What a successor has to know, of a session at rest.
    pub(super) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedSession> {
        Ok(SavedSession {
            socket: fds.add(self.socket.as_fd().try_clone_to_owned()?),
            received: match &self.intake {
                // It is in the socket, too.
                Some(_) => SavedDecoder::default(),
                None => self.decoder.save(fds)?,
            },
            link: self.link.save(fds)?,
            recorded: self.intake.is_some(),
            handled: self.intake.as_ref().and_then(|intake| intake.pending),
        })
    }

    /// From now on, what the peer does is recorded; not if a part of a message is here already, and
    /// not in the socket any more.
    pub(super) fn begin_recording(&mut self) -> bool {
        let consumed = self.decoder.position();
        if self.intake.is_none()
            && !self.decoder.is_partial()
            && peek_from(self.socket.as_fd(), 0).is_ok()
        {
            self.intake = Some(Intake { consumed, pending: None });
        }
        self.intake.is_some()
    }

    /// Whether it [is recorded](Self::begin_recording).
    pub(super) fn is_recorded(&self) -> bool {
        self.intake.is_some()
    }

    /// Records what the message in hand has brought about, takes it out of the socket, and sends
    /// the reply to it.
    fn commit(
        &mut self,
        device: &mut dyn Device,
        record: Record<'_>,
        exchange: Option<&mut Exchange>,
    ) -> Result<(), EndReason> {
        let Some(intake) = &mut self.intake else { return Ok(()) };
        if !self.link.is_at_rest() {
            return Ok(());
        }
        let len = (self.decoder.position() - intake.consumed) as usize;
        abort_point(AbortPoint::MessageHandled);
        if self.link.take_changed() {
            let handled = (len != 0).then(|| Handled::new(self.decoder.handed_out(len)));
            intake.pending = handled.or(intake.pending);
            let mut fds = Descriptors::default();
            record(self.describe(device, &mut fds), fds);
            abort_point(AbortPoint::MessageRecorded);
        }
        if let Some(intake) = &mut self.intake {
            intake.pending = None;
            intake.consumed += len as u64;
        }
        self.answer_and_take(len, exchange)?;
        if len != 0 && !self.link.out.is_empty() {
            // The peer does not read what it gets. So what it has not got is recorded.
            let mut fds = Descriptors::default();
            record(self.describe(device, &mut fds), fds);
        }
        Ok(())
    }

    /// Sends the reply and takes its request out of the socket, in one step if that can be: a
    /// process that dies in between would leave its successor with no way to know which was done.
    fn answer_and_take(
        &mut self,
        len: usize,
        exchange: Option<&mut Exchange>,
    ) -> Result<(), EndReason> {
        let is_answered = len != 0 && !self.link.out.is_empty() && !self.full;
        let both = exchange.filter(|_| is_answered).and_then(|exchange| {
            let (reply, fds) = self.link.out.front();
            let closer = self.inspector.closer();
            exchange.answer_and_take(self.socket.as_fd(), reply, fds, len, closer)
        });
        let mut left = len;
        if let Some(Exchanged { sent, taken, fds }) = both {
            // They come again, and are closed like all others.
            drop(self.inspector.inspect(fds));
            left -= taken.unwrap_or(0);
            self.note_sent(sent)?;
        }
        discard(self.socket.as_fd(), left, &self.inspector)?;
        abort_point(AbortPoint::MessageAnswered);
        Ok(())
    }

    /// What is recorded.
    pub(super) fn describe(
        &self,
        device: &mut dyn Device,
        fds: &mut Descriptors,
    ) -> Result<(SavedSession, serde_json::Value), SaveError> {
        Ok((self.save(fds)?, device.record(fds)?))
    }

    /// Where a process that has died was with this peer: what it has carried out is taken out of
    /// the socket, if it had not come to that, and then its replies are sent.
    fn catch_up(&mut self, exchange: Option<&mut Exchange>) -> Result<(), EndReason> {
        let Some(Handled { len, hash }) = self.intake.as_mut().and_then(|i| i.pending.take())
        else {
            return Ok(());
        };
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        let arrival = peek_some(self.socket.as_fd(), &mut bytes, self.inspector.closer());
        let is_there = arrival.is_ok_and(|arrival| arrival.bytes == bytes.len())
            && Handled::new(&bytes) == Handled { len, hash };
        if is_there {
            self.answer_and_take(bytes.len(), exchange)?;
        } else {
            // It came to the replies as well.
            self.link.out = SendQueue::default();
        }
        peek_from(self.socket.as_fd(), 0)?;
        Ok(())
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
        if self.is_recorded() {
            // Another process may have looked at the socket, too, and come to nothing.
            let _ = peek_from(self.socket.as_fd(), self.decoder.held());
        }
    }

    /// Finishes the message in hand, if there is one, and begins no other.
    pub(super) fn rest(
        &mut self,
        device: &mut dyn Device,
        context: &mut Context<'_>,
        record: Record<'_>,
    ) -> Turn {
        self.come_to_rest(device, context, record).unwrap_or_else(Turn::End)
    }

    /// Nothing is half carried out.
    pub(super) fn is_at_rest(&self) -> bool {
        self.link.is_at_rest() && self.arrival.is_none()
    }

    fn come_to_rest(
        &mut self,
        device: &mut dyn Device,
        context: &mut Context<'_>,
        record: Record<'_>,
    ) -> Result<Turn, EndReason> {
        self.catch_up(context.exchange.as_deref_mut())?;
        if self.link.awaits().is_none() {
            self.link.go_on(device, context);
            device.settle();
            self.commit(device, record, context.exchange.as_deref_mut())?;
        }
        // What another thread has received and nobody has looked at is not to be handed on.
        self.look_again()?;
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
            intake: None,
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
    pub(super) fn turn(
        &mut self,
        device: &mut dyn Device,
        context: &mut Context<'_>,
        record: Record<'_>,
    ) -> Turn {
        match self.work(device, context, record) {
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
        record: Record<'_>,
    ) -> Result<Turn, EndReason> {
        let mut left = TURN;
        self.catch_up(context.exchange.as_deref_mut())?;
        self.look_again()?;
        loop {
            // One after the other, if each is recorded, and not before the last was answered.
            let is_recorded = self.is_recorded();
            let outcome = if is_recorded && !self.link.out.is_empty() {
                Ok(false)
            } else if is_recorded {
                let mut one = 1;
                let outcome = self.handle_all(&mut one, device, context);
                left -= 1 - one;
                outcome
            } else {
                self.handle_all(&mut left, device, context)
            };
            device.settle();
            self.commit(device, record, context.exchange.as_deref_mut())?;
            // Also an error reply is worth sending before the end.
            self.flush()?;
            let emptied = outcome?;
            let most = if is_recorded { 0 } else { HIGH_WATER };
            if self.link.awaits().is_some() || self.link.out.len() > most {
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
                None if is_recorded => peek(self.socket.as_fd(), decoder, inspector)
                    .map(|arrival| take_in(arrival, decoder, inspector)),
                None => receive(self.socket.as_fd(), decoder, inspector),
            };
            if self.inspector.closer().is_overloaded() {
                return Err(EndReason::FdsStuck);
            }
            match received {
                // A hang-up is announced only once: then read on until it shows.
                Ok(Received::Bytes { drained }) => {
                    abort_point(AbortPoint::MessageRead);
                    self.readable = !drained || self.hung_up;
                }
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
        if self.intake.as_ref().is_some_and(|intake| {
            intake.pending.is_some() || intake.consumed != self.decoder.position()
        }) {
            return false;
        }
        let moving = self.readable || self.hung_up || self.full || self.arrival.is_some();
        !moving && self.expected.is_none() && self.link.is_idle() && !self.decoder.is_partial()
    }

    /// Takes what comes in as far as it is nothing but writes that `write` takes, on a thread that
    /// is not the reactor's. What else there is stays, for a [turn](Self::turn).
    ///
    /// If the session is recorded, there is nothing to record of such writes: what they bring about
    /// outlives the process by itself, and it may be brought about twice. So they leave the socket
    /// when `write` has taken them. A reply has to be sent together with that, which is the
    /// reactor's: so it is posted writes only.
    pub(super) fn poll_writes(
        &mut self,
        write: &mut dyn FnMut(u32, u64, &[u8]) -> bool,
    ) -> PolledWrites {
        if self.arrival.is_some() {
            // What an earlier call has left to the reactor comes first.
            return PolledWrites { writes: 0, all: false };
        }
        let is_recorded = self.is_recorded();
        let (mut writes, mut drained) = (0, false);
        for _ in 0..POLL {
            if let Some((header, payload)) = self.decoder.peek() {
                if is_recorded && !header.no_reply()
                    || !self.link.handle_write(&header, payload, write)
                {
                    break;
                }
                writes += 1;
                // It is that one, and good.
                let _ = self.decoder.decode();
            } else if self.decoder.is_partial() || drained {
                break;
            } else {
                let closer = self.inspector.closer();
                let receive = if is_recorded { peek_some } else { receive_some };
                match receive(self.socket.as_fd(), self.decoder.space(), closer) {
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
        // Whatever these come to, they come to it again in a turn.
        let taken = self.take_writes().is_ok();
        let sent = self.flush().is_ok() && self.link.out.is_empty();
        let all = drained && taken && sent && self.arrival.is_none() && !self.decoder.is_partial();
        PolledWrites { writes, all }
    }

    /// What another thread has only looked at is there still, and the reactor looks at it in its
    /// own way: at descriptors together with all that they came with.
    fn look_again(&mut self) -> Result<(), Errno> {
        if self.is_recorded()
            && let Some(arrival) = self.arrival.take()
        {
            drop(self.inspector.inspect(arrival.fds));
            peek_from(self.socket.as_fd(), self.decoder.held())?;
        }
        Ok(())
    }

    /// Takes the writes out of the socket that [were carried out](Self::poll_writes).
    fn take_writes(&mut self) -> Result<(), Errno> {
        let Some(intake) = &mut self.intake else { return Ok(()) };
        let len = (self.decoder.position() - intake.consumed) as usize;
        if len == 0 {
            return Ok(());
        }
        abort_point(AbortPoint::MessageHandled);
        intake.consumed += len as u64;
        discard(self.socket.as_fd(), len, &self.inspector)?;
        abort_point(AbortPoint::MessageAnswered);
        Ok(())
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
            let sent = send_owned(self.socket.as_fd(), bytes, fds);
            self.note_sent(sent)?;
        }
        Ok(())
    }

    /// So much of what waits was sent.
    fn note_sent(&mut self, sent: Result<usize, Errno>) -> Result<(), EndReason> {
        match sent {
            Ok(len) => {
                self.link.out.sent(len);
                self.sent += len as u64;
            }
            Err(Errno::AGAIN) => self.full = true,
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(EndReason::Left),
            Err(errno) => return Err(errno.into()),
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

/// Looks at what comes next in the socket.
fn peek(
    socket: BorrowedFd<'_>,
    decoder: &mut Decoder,
    inspector: &Inspector,
) -> Result<Arrival, Errno> {
    let arrival = peek_some(socket, decoder.space(), inspector.closer())?;
    if arrival.fds.is_empty() || arrival.is_short {
        return Ok(arrival);
    }
    // There may be more of what the descriptors came with, and a look at the rest would bring them
    // again: so all of it at once.
    drop(inspector.inspect(arrival.fds));
    peek_from(socket, decoder.held())?;
    peek_some(socket, decoder.space_of(WHOLE), inspector.closer())
}

/// More than a socket holds of what was sent in one piece.
const WHOLE: usize = 256 << 10;
