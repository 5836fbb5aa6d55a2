//! Session of a connected client: receives and handles messages, sends replies, and sets deadlines
//! for the client.

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
use crate::codec::{DecodeError, Decoder, SendQueue};
use crate::descriptor::{Inspector, Stream};
use crate::device::Device;
use crate::exchange::{Exchange, Exchanged};
use crate::handover::{RestoreError, SaveError};
use crate::shared_socket::PolledWrites;
use crate::socket::{
    Received, RecvOutput, discard, peek_from, peek_some, receive, receive_some, send_owned, take_in,
};

/// Maximum amount of work on one connection per turn of the reactor: each receive and each handled
/// message counts as one.
const MAX_MESSAGES: u32 = 64;

/// Maximum amount of work per call of [`Session::poll_writes`]: each receive and each handled
/// message counts as one.
const POLL: u32 = 16;

/// Number of unsent bytes above which no requests are handled. So the send queue is at most one
/// reply longer than this size.
const HIGH_WATER: usize = 64 * 1024;

/// Reason why a connection has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum EndReason {
    #[error("it closed the connection")]
    Closed,
    #[error("it closed the connection in the middle of a message")]
    ClosedMidMessage,
    #[error("{0}")]
    Garbage(#[from] DecodeError),
    #[error("{0}")]
    Violation(#[from] Violation),
    #[error("its descriptors could not be received: too many are open in this process")]
    FdsLost,
    #[error("too many of its descriptors wait to be closed")]
    FdsStuck,
    #[error("its socket failed: {0}")]
    Socket(#[from] Errno),
    #[error("it did not agree on a version in time")]
    NegotiationOverdue,
    #[error("it did not complete a message in time")]
    MessageOverdue,
    #[error("it did not read its replies in time")]
    RepliesUnread,
    #[error("the server ends the connection")]
    Dropped,
}

/// Action of the reactor after a connection's turn.
pub(super) enum Turn {
    /// Wait until the socket or the device reports an event.
    Wait,
    /// Schedule another turn.
    Requeue,
    /// Close the connection.
    End(EndReason),
}

/// Action that the client has to take before a deadline. The deadline is set anew only if the
/// expected action changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    Version,
    /// Send the rest of the message that starts at this position of the stream.
    Message(u64),
    /// Read the replies from this position of the sent stream on.
    Reading(u64),
}

/// Session of a connected client.
pub(super) struct Session {
    socket: Stream,
    inspector: Inspector,
    decoder: Decoder,
    /// Received data that [`Session::poll_writes`] could not handle and has left for the next turn.
    recv: Option<RecvOutput>,
    pub(super) link: Link,
    readable: bool,
    hung_up: bool,
    /// True if the socket is full, so that the reactor has to watch for writability.
    pub(super) full: bool,
    sent: u64,
    expected: Option<(Expected, Instant)>,
    /// State for checkpoints; `None` if checkpoints are off.
    intake: Option<Intake>,
}

/// State of a session with checkpoints. A message stays in the socket until a checkpoint contains
/// its effects. So after a crash, the socket still has all messages whose effects are not in the
/// checkpoint.
#[derive(Debug)]
struct Intake {
    /// Decoder position up to which messages have been removed from the socket.
    consumed: u64,
    /// Last executed message, whose effects are in the checkpoint. If the process dies before it
    /// removes the message, the message is still at the start of the socket's data, and its reply
    /// is in the link's queue.
    pending: Option<Handled>,
    /// Message whose request waits for a [`Completer`](crate::Completer). Its hash is computed
    /// before more data are received, because these overwrite the message in the decoder.
    waiting: Option<Handled>,
    /// Number of unsent bytes in the last checkpoint that the next process has to send in any case.
    unsent: usize,
}

/// Callback that stores a checkpoint of the session and the device. The descriptors belong to that
/// state.
pub(super) type Record<'a> =
    &'a mut dyn FnMut(Result<(SavedSession, serde_json::Value), SaveError>, Descriptors);

impl Session {
    /// Restores a session from the state of [`describe`](Self::describe). The previous process may
    /// still have the socket, so the session starts as after [`set_lent(true)`](Self::set_lent).
    /// `make` wraps the socket in a [`Stream`].
    pub(super) fn restore(
        saved: SavedSession,
        fds: &mut Descriptors,
        make: impl FnOnce(OwnedFd) -> (Stream, Inspector),
        limits: &Limits,
    ) -> Result<Self, RestoreError> {
        let SavedSession { socket, link, handled } = saved;
        let link = Link::restore(link, fds)?;
        let (mut socket, inspector) = make(fds.take(socket)?);
        socket.set_lent(true);
        // Negotiated limits stay valid, even if the limits of this process are different.
        let max_data_xfer_size = link.max_xfer().unwrap_or(limits.max_data_xfer_size);
        let mut session = Self::new(socket, inspector, &Limits { max_data_xfer_size, ..*limits });
        session.link = link;
        session.intake = Some(Intake { consumed: 0, pending: handled, waiting: None, unsent: 0 });
        Ok(session)
    }

    /// Turns on checkpoints. Returns false if they are impossible, because a part of a message has
    /// already been removed from the socket.
    pub(super) fn start_recording(&mut self) -> bool {
        let consumed = self.decoder.position();
        if self.intake.is_none()
            && !self.decoder.is_partial()
            && peek_from(self.socket.as_fd(), 0).is_ok()
        {
            self.intake = Some(Intake { consumed, pending: None, waiting: None, unsent: 0 });
        }
        self.intake.is_some()
    }

    /// True after [`start_recording`](Self::start_recording).
    pub(super) fn is_recorded(&self) -> bool {
        self.intake.is_some()
    }

    /// Stores a checkpoint with the effects of the current message, then removes the message from
    /// the socket and sends its reply.
    fn commit(
        &mut self,
        device: &mut dyn Device,
        record: Record<'_>,
        exchange: Option<&mut Exchange>,
    ) -> Result<(), EndReason> {
        let Some(intake) = &mut self.intake else { return Ok(()) };
        let len = (self.decoder.position() - intake.consumed) as usize;
        let handled = |decoder: &Decoder| (len != 0).then(|| Handled::new(decoder.consumed(len)));
        if !self.link.is_between_requests() {
            intake.waiting = intake.waiting.or_else(|| handled(&self.decoder));
            return Ok(());
        }
        abort_point(AbortPoint::MessageHandled);
        let waited = intake.waiting.take();
        if self.link.take_changed() {
            let handled = waited.or_else(|| handled(&self.decoder));
            intake.pending = handled.or(intake.pending);
            let mut fds = Descriptors::default();
            record(self.describe(device, &mut fds), fds);
            abort_point(AbortPoint::MessageRecorded);
        }
        if let Some(intake) = &mut self.intake {
            intake.pending = None;
            intake.consumed += len as u64;
        }
        self.answer(len, device, record, exchange)
    }

    /// Sends the reply to an executed message of `len` bytes, and removes the message from the
    /// socket.
    fn answer(
        &mut self,
        len: usize,
        device: &mut dyn Device,
        record: Record<'_>,
        exchange: Option<&mut Exchange>,
    ) -> Result<(), EndReason> {
        self.reply_and_receive(len, exchange)?;
        if len != 0 && !self.link.out.is_empty() {
            // The socket is full, so a checkpoint must contain the unsent rest of the reply.
            let mut fds = Descriptors::default();
            record(self.describe(device, &mut fds), fds);
        }
        Ok(())
    }

    /// Sends the reply and removes its request from the socket, in one step if possible. If the
    /// process died between two steps, the next process would not know whether the first step was
    /// done, and would send the reply twice.
    fn reply_and_receive(
        &mut self,
        len: usize,
        exchange: Option<&mut Exchange>,
    ) -> Result<(), EndReason> {
        let is_answered = len != 0 && !self.link.out.is_empty() && !self.full;
        let both = exchange.filter(|_| is_answered).and_then(|exchange| {
            let (reply, fds) = self.link.out.front();
            let closer = self.inspector.closer();
            exchange.reply_and_receive(self.socket.as_fd(), reply, fds, len, closer)
        });
        let mut left = len;
        if let Some(Exchanged { sent, received, fds }) = both {
            // These are duplicates of descriptors that were received before, so they are dropped.
            drop(self.inspector.inspect(fds));
            left -= received.unwrap_or(0);
            self.note_sent(sent)?;
        } else if is_answered {
            self.flush()?;
        }
        discard(self.socket.as_fd(), left, &self.inspector)?;
        abort_point(AbortPoint::MessageAnswered);
        Ok(())
    }

    /// State of session and device for a checkpoint.
    pub(super) fn describe(
        &mut self,
        device: &mut dyn Device,
        fds: &mut Descriptors,
    ) -> Result<(SavedSession, serde_json::Value), SaveError> {
        let session = SavedSession {
            socket: fds.add(self.socket.as_fd().try_clone_to_owned()?),
            link: self.link.save(fds)?,
            handled: self.intake.as_ref().and_then(|intake| intake.pending),
        };
        if let Some(intake) = &mut self.intake {
            intake.unsent = if intake.pending.is_some() { 0 } else { self.link.out.len() };
        }
        Ok((session, device.record(fds)?))
    }

    /// Sends replies. If the last checkpoint contains bytes that have been sent since, stores
    /// another one, because the next process would send these bytes again.
    fn flush_and_record(
        &mut self,
        device: &mut dyn Device,
        record: Record<'_>,
    ) -> Result<(), EndReason> {
        self.flush()?;
        let unsent = self.link.out.len();
        let recorded = self.intake.as_ref().map_or(0, |intake| intake.unsent);
        if recorded != 0 && recorded != unsent {
            let mut fds = Descriptors::default();
            record(self.describe(device, &mut fds), fds);
        }
        Ok(())
    }

    /// Finishes the last executed message of a dead process. If the message is still in the socket,
    /// removes it and sends its reply.
    fn catch_up(
        &mut self,
        device: &mut dyn Device,
        record: Record<'_>,
        exchange: Option<&mut Exchange>,
    ) -> Result<(), EndReason> {
        let Some(Handled { len, hash }) = self.intake.as_mut().and_then(|i| i.pending.take())
        else {
            return Ok(());
        };
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
        let recv = peek_some(self.socket.as_fd(), &mut bytes, self.inspector.closer());
        let is_there = recv.is_ok_and(|recv| recv.bytes == bytes.len())
            && Handled::new(&bytes) == Handled { len, hash };
        if is_there {
            self.answer(bytes.len(), device, record, exchange)?;
        } else {
            // The message is no longer in the socket, so the dead process has sent its reply in the
            // same step. The restored reply is dropped.
            self.link.out = SendQueue::default();
        }
        peek_from(self.socket.as_fd(), 0)?;
        Ok(())
    }

    /// Sets whether another process also has the socket, and serves the client on it. If `is_lent`
    /// is true, dropping the session does not affect the client.
    pub(super) fn set_lent(&mut self, is_lent: bool) {
        self.socket.set_lent(is_lent);
    }

    /// Resumes after a freeze. During the freeze, no deadline ran and the socket was not read.
    pub(super) fn wake(&mut self) {
        self.readable = true;
        self.full = false;
        self.expected = None;
        if self.is_recorded() {
            // Another process that had the socket may have changed its peek offset, even if that
            // process executed no message.
            let _ = peek_from(self.socket.as_fd(), self.decoder.buffered());
        }
    }

    /// Quiesces the session: finishes the current message, if any, and starts no other.
    pub(super) fn quiesce(
        &mut self,
        device: &mut dyn Device,
        context: &mut Context<'_>,
        record: Record<'_>,
    ) -> Turn {
        self.finish_message(device, context, record).unwrap_or_else(Turn::End)
    }

    /// True if no request is partly executed, and no received data are left for a turn.
    pub(super) fn is_quiesced(&self) -> bool {
        self.link.is_quiesced() && self.recv.is_none()
    }

    fn finish_message(
        &mut self,
        device: &mut dyn Device,
        context: &mut Context<'_>,
        record: Record<'_>,
    ) -> Result<Turn, EndReason> {
        self.catch_up(device, record, context.exchange.as_deref_mut())?;
        self.reply_to_unmaps(device, record)?;
        if self.link.awaits().is_none() {
            self.link.resume(device, context);
            device.publish();
            self.commit(device, record, context.exchange.as_deref_mut())?;
        }
        // A saved session does not contain `recv`, the data that a second thread has received. So
        // `recv` must be empty when another process continues. If the data are still in the socket,
        // `recv` is dropped. Otherwise its data go to the decoder, after their descriptors are
        // inspected.
        self.discard_peeked()?;
        match self.recv.take().map(|it| take_in(it, &mut self.decoder, &self.inspector)) {
            Some(Received::Closed) => return Err(EndReason::Closed),
            Some(Received::FdsLost) => return Err(EndReason::FdsLost),
            Some(Received::Bytes { .. }) | None => {}
        }
        self.flush_and_record(device, record)?;
        // An unmap that ended together with the current message gets its reply after that message.
        self.reply_to_unmaps(device, record)?;
        Ok(if self.link.is_unfinished() { Turn::Requeue } else { Turn::Wait })
    }

    pub(super) fn new(socket: Stream, inspector: Inspector, limits: &Limits) -> Self {
        let max = usize::try_from(limits.max_data_xfer_size).unwrap_or(usize::MAX);
        Self {
            socket,
            inspector,
            decoder: Decoder::new(max),
            recv: None,
            link: Link::default(),
            // The first message may be in the socket already.
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

    /// Stores events of the socket for the next turn.
    pub(super) fn notify(&mut self, readable: bool, writable: bool, hung_up: bool) {
        self.readable |= readable || hung_up;
        self.hung_up |= hung_up;
        if writable || hung_up {
            self.full = false;
        }
    }

    /// Deadline of the client, if any.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.expected.map(|(_, until)| until)
    }

    /// Reason with which the connection ends if the client misses its deadline.
    pub(super) fn overdue(&self) -> EndReason {
        match self.expected {
            Some((Expected::Message(_), _)) => EndReason::MessageOverdue,
            Some((Expected::Reading(_), _)) => EndReason::RepliesUnread,
            _ => EndReason::NegotiationOverdue,
        }
    }

    /// Receives, handles and sends messages, up to the limit for a turn.
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
        let mut left = MAX_MESSAGES;
        self.catch_up(device, record, context.exchange.as_deref_mut())?;
        self.discard_peeked()?;
        loop {
            self.reply_to_unmaps(device, record)?;
            // With checkpoints, messages are handled one at a time, each after the previous reply
            // was sent.
            let is_recorded = self.is_recorded();
            let outcome = if is_recorded && (!self.link.out.is_empty() || self.has_uncommitted()) {
                Ok(false)
            } else if is_recorded {
                let mut one = 1;
                let outcome = self.handle_all(&mut one, device, context);
                left -= 1 - one;
                outcome
            } else {
                self.handle_all(&mut left, device, context)
            };
            device.publish();
            self.commit(device, record, context.exchange.as_deref_mut())?;
            // An error reply is sent even if the error ends the connection.
            self.flush_and_record(device, record)?;
            let emptied = outcome?;
            if is_recorded {
                self.reply_to_unmaps(device, record)?;
            }
            let most = if is_recorded { 0 } else { HIGH_WATER };
            if self.link.out.len() > most {
                return Ok(Turn::Wait);
            }
            let waits = self.link.awaits().is_some();
            if waits && !self.link.can_postpone() {
                return Ok(Turn::Wait);
            }
            if left == 0 || self.link.is_unfinished() || context.slice.is_over() {
                return Ok(Turn::Requeue);
            }
            // The reply to a postponed unmap that has ended is sent between two requests.
            if waits && (self.decoder.has_message() || self.link.has_ended_unmaps()) {
                self.link.postpone();
                self.commit(device, record, context.exchange.as_deref_mut())?;
                continue;
            }
            if !waits && !emptied {
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
            let received = match self.recv.take() {
                Some(recv) => Ok(take_in(recv, decoder, inspector)),
                None if is_recorded => peek(self.socket.as_fd(), decoder, inspector)
                    .map(|recv| take_in(recv, decoder, inspector)),
                None => receive(self.socket.as_fd(), decoder, inspector),
            };
            if self.inspector.closer().is_overloaded() {
                return Err(EndReason::FdsStuck);
            }
            match received {
                // A hang-up is reported only once. So after a hang-up, the session reads until a
                // read returns the end of the stream.
                Ok(Received::Bytes { drained }) => {
                    abort_point(AbortPoint::MessageRead);
                    self.readable = !drained || self.hung_up;
                }
                Ok(Received::Closed) if self.decoder.is_partial() => {
                    return Err(EndReason::ClosedMidMessage);
                }
                Ok(Received::Closed) => return Err(EndReason::Closed),
                Ok(Received::FdsLost) => return Err(EndReason::FdsLost),
                Err(Errno::AGAIN) => self.readable = false,
                Err(Errno::CONNRESET) => return Err(EndReason::Closed),
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Sends the replies to postponed unmaps that have ended. If checkpoints are on, then stores
    /// one without these unmaps. If this process dies between the two steps, the next process sends
    /// the replies again.
    fn reply_to_unmaps(
        &mut self,
        device: &mut dyn Device,
        record: Record<'_>,
    ) -> Result<(), EndReason> {
        let is_recorded = self.is_recorded();
        // The reply of a message that is not committed yet must not be sent with these.
        let is_committed =
            self.link.is_between_requests() && !self.has_uncommitted() && self.link.out.is_empty();
        if is_recorded && !is_committed || !self.link.reply_to_unmaps() {
            return Ok(());
        }
        self.flush()?;
        if is_recorded {
            let mut fds = Descriptors::default();
            record(self.describe(device, &mut fds), fds);
        }
        Ok(())
    }

    /// True if a message was executed that [`commit`](Self::commit) has not removed from the socket
    /// yet. The next message is executed after that, so that the checkpoint has one message.
    fn has_uncommitted(&self) -> bool {
        let consumed = self.intake.as_ref().map(|intake| intake.consumed);
        self.link.is_between_requests()
            && consumed.is_some_and(|consumed| consumed != self.decoder.position())
    }

    /// True if the socket has data.
    pub(super) fn has_input(&self) -> bool {
        !matches!(rustix::io::ioctl_fionread(self.socket.as_fd()), Ok(0))
    }

    /// True if the last message waits for the device. An unmap, which waits only for storage, does
    /// not count.
    pub(super) fn is_waiting(&self) -> bool {
        self.link.awaits().is_some() && !self.link.is_unmapping()
    }

    /// True if a restored session has handled a message, or has found none in its socket.
    pub(super) fn has_replayed(&self) -> bool {
        let has_handled = self.intake.as_ref().is_none_or(|intake| intake.consumed != 0);
        self.link.is_between_requests() && (has_handled || !self.readable)
    }

    /// True if no data are partly received or partly sent, and no request is outstanding.
    pub(super) fn is_idle(&self) -> bool {
        if self.intake.as_ref().is_some_and(|intake| {
            intake.pending.is_some() || intake.consumed != self.decoder.position()
        }) {
            return false;
        }
        let moving = self.readable || self.hung_up || self.full || self.recv.is_some();
        !moving && self.expected.is_none() && self.link.is_idle() && !self.decoder.is_partial()
    }

    /// Receives messages on a second thread, and handles the writes that `write` accepts. All other
    /// data are left for a [turn](Self::turn) of the reactor.
    ///
    /// The accepted writes need no checkpoint, because their effects survive a crash and they may
    /// be repeated. They are removed from the socket after `write` has accepted them. With
    /// checkpoints, only posted writes are handled: a reply must be sent together with the removal
    /// of its message, and only the reactor can do that.
    pub(super) fn poll_writes(
        &mut self,
        write: &mut dyn FnMut(u32, u64, &[u8]) -> bool,
    ) -> PolledWrites {
        if self.recv.is_some() {
            // Data that an earlier call has left for the reactor must be handled first.
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
                // `peek` has returned this message, so it is valid. This call removes it from the
                // decoder.
                let _ = self.decoder.decode();
            } else if self.decoder.is_partial() || drained {
                break;
            } else {
                let closer = self.inspector.closer();
                let receive = if is_recorded { peek_some } else { receive_some };
                match receive(self.socket.as_fd(), self.decoder.space(), closer) {
                    Ok(recv) if recv.is_plain() => {
                        drained = recv.is_short;
                        self.decoder.advance(recv.bytes, Vec::new());
                    }
                    Ok(recv) => {
                        self.recv = Some(recv);
                        break;
                    }
                    Err(errno) => {
                        drained = errno == Errno::AGAIN;
                        break;
                    }
                }
            }
        }
        // If an error occurs here, the reactor's turn gets the same error.
        let taken = self.take_writes().is_ok();
        let sent = self.flush().is_ok() && self.link.out.is_empty();
        let all = drained && taken && sent && self.recv.is_none() && !self.decoder.is_partial();
        PolledWrites { writes, all }
    }

    /// Discards data that a second thread has peeked at. The reactor peeks again, because it
    /// inspects descriptors together with all bytes of their message.
    fn discard_peeked(&mut self) -> Result<(), Errno> {
        if self.is_recorded()
            && let Some(recv) = self.recv.take()
        {
            drop(self.inspector.inspect(recv.fds));
            peek_from(self.socket.as_fd(), self.decoder.buffered())?;
        }
        Ok(())
    }

    /// Removes the writes that [`poll_writes`](Self::poll_writes) has executed from the socket.
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

    /// Handles messages. Returns true if no complete message is left.
    fn handle_all(
        &mut self,
        left: &mut u32,
        device: &mut dyn Device,
        context: &mut Context<'_>,
    ) -> Result<bool, EndReason> {
        while *left > 0 && self.link.awaits().is_none() && self.link.out.len() <= HIGH_WATER {
            if self.link.is_unfinished() {
                self.link.resume(device, context);
                if self.link.is_unfinished() || self.is_recorded() {
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

    /// Updates the send queue after a send.
    fn note_sent(&mut self, sent: Result<usize, Errno>) -> Result<(), EndReason> {
        match sent {
            Ok(len) => {
                self.link.out.sent(len);
                self.sent += len as u64;
            }
            Err(Errno::AGAIN) => self.full = true,
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(EndReason::Closed),
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

/// Peeks at the next data in the socket.
fn peek(
    socket: BorrowedFd<'_>,
    decoder: &mut Decoder,
    inspector: &Inspector,
) -> Result<RecvOutput, Errno> {
    let recv = peek_some(socket, decoder.space(), inspector.closer())?;
    if recv.fds.is_empty() || recv.is_short {
        return Ok(recv);
    }
    // The socket may have further bytes of the message to which the received descriptors belong. A
    // second peek at only these bytes would return the descriptors again. So all bytes are peeked
    // at together.
    drop(inspector.inspect(recv.fds));
    peek_from(socket, decoder.buffered())?;
    peek_some(socket, decoder.space_of(MAX_SEND), inspector.closer())
}

/// Buffer size for one peek, in bytes: more than a socket can contain.
const MAX_SEND: usize = 256 << 10;
