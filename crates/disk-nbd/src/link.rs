//! Connection to the server, with its requests in flight. A thread that holds the lock sends and
//! receives for all queues of the connection, without blocking.

use crate::export::Export;
use crate::receiver::Receiver;
use crate::shared::Shared;
use crate::stream::Stream;
use crate::subrequest::{Owner, Subrequest, Subrequests};
use crate::unflushed::{Entry, Flush};
use crate::user::{SubrequestResult, User};
use rustix::io::Errno;
use shadowbell_disk::{DiskError, Lists};
use shadowbell_nbd::wire::{self, command};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::warn;

/// Index of the list of waiting subrequests in [`Link::waiting`].
const WAITING: u32 = 0;

/// Maximum number of requests in flight at the server, and maximum size of their data in bytes.
const WINDOW: usize = 256;
const WINDOW_BYTES: usize = 16 << 20;
/// Maximum number of requests per system call that sends.
const BATCH: usize = 64;
/// Number of protocol violations after which a request fails. Only violations while the request was
/// in flight count; each has ended the connection.
const MAX_BREAKS: u32 = 4;
/// Maximum number of free buffers to keep, for each size.
const MAX_POOLED_BUFFERS: usize = 64;
/// Buffer sizes in bytes.
const SIZES: [usize; 3] = [4 << 10, 32 << 10, 256 << 10];

/// Reason for the end of a connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Loss {
    #[error("the server hung up")]
    End,
    #[error("the connection failed: {0}")]
    Socket(#[from] Errno),
    #[error("the server violates the protocol: {0}")]
    Violation(#[from] crate::receiver::Violation),
    #[error("the server does not reply on one connection after another was lost")]
    Silent,
}

/// Queue that calls a method of the link: its number on the connection, and the list to which its
/// completions are added directly.
pub(crate) type CallerResults<'a> = (u32, &'a mut Vec<SubrequestResult>);

struct Connection {
    stream: Stream,
    receiver: Receiver,
    /// Encoded requests to send, in order, each with the index of its subrequest. The first one may
    /// have been sent in part.
    sending: VecDeque<(u32, [u8; wire::Request::SIZE])>,
    /// Number of bytes of the first request, including its data, that were sent.
    sent: usize,
    /// True if the socket buffer is full. All queues of the connection are then woken when it has
    /// room.
    is_blocked: bool,
}

#[derive(Default)]
pub(crate) struct Link {
    connection: Option<Connection>,
    parts: Subrequests,
    /// Subrequests that are not sent yet, in order.
    waiting: Lists,
    /// Number of requests in flight at the server, and the size of their data in bytes.
    in_flight: usize,
    bytes: usize,
    users: Vec<Option<Arc<User>>>,
    buffers: [Vec<Vec<u8>>; SIZES.len()],
}

impl Link {
    /// Adds a queue. Returns its number on this connection.
    pub(crate) fn join(&mut self, user: &Arc<User>) -> std::io::Result<u32> {
        if let Some(connection) = &self.connection {
            user.watch(connection.stream.as_fd())?;
        }
        let at = match self.users.iter().position(Option::is_none) {
            Some(at) => at,
            None => {
                self.users.push(None);
                self.users.len() - 1
            }
        };
        if let Some(place) = self.users.get_mut(at) {
            *place = Some(Arc::clone(user));
        }
        Ok(at as u32)
    }

    /// Removes a queue with its unsent subrequests. Sent writes become orphans.
    pub(crate) fn leave(&mut self, user: u32, shared: &Shared) {
        for slot in self.parts.all(|part| part.owner.is_some_and(|owner| owner.user == user)) {
            if !self.drop_subrequest(slot, shared) {
                // The number will be reused, and the next queue with it must not get the result of
                // this subrequest.
                self.parts.disown(slot);
            }
        }
        if let Some(place) = self.users.get_mut(user as usize) {
            *place = None;
        }
    }

    /// Number of queues.
    pub(crate) fn users(&self) -> usize {
        self.users.iter().flatten().count()
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// Returns the socket if requests are in flight. The flag is true if some of them are not
    /// completely sent yet.
    pub(crate) fn busy(&self) -> Option<(Stream, bool)> {
        let connection = self.connection.as_ref().filter(|_| self.in_flight != 0)?;
        Some((connection.stream.clone(), !connection.sending.is_empty()))
    }

    pub(crate) fn stream(&self) -> Option<Stream> {
        Some(self.connection.as_ref()?.stream.clone())
    }

    /// Returns a buffer of `len` bytes.
    pub(crate) fn buffer(&mut self, len: usize) -> Vec<u8> {
        let class = SIZES.iter().zip(&mut self.buffers).find(|(size, _)| len <= **size);
        let mut buffer = match class {
            Some((size, saved)) => saved.pop().unwrap_or_else(|| Vec::with_capacity(*size)),
            None => Vec::with_capacity(len),
        };
        buffer.resize(len, 0);
        buffer
    }

    /// Returns a buffer to the pool of free buffers.
    pub(crate) fn recycle(&mut self, buffer: Vec<u8>) {
        let class =
            SIZES.iter().zip(&mut self.buffers).find(|(size, _)| buffer.capacity() == **size);
        if let Some((_, saved)) = class
            && saved.len() < MAX_POOLED_BUFFERS
        {
            saved.push(buffer);
        }
    }

    /// Adds a subrequest. [`pump`](Self::pump) will send it.
    pub(crate) fn push(&mut self, part: Subrequest) {
        let slot = self.parts.insert(part);
        self.waiting.push_back(WAITING, slot);
    }

    /// Adds an automatic flush, in front of all waiting subrequests.
    pub(crate) fn push_flush(&mut self) {
        let mut flush = Subrequest::new(command::FLUSH, 0, 0, 0, Vec::new());
        flush.is_automatic = true;
        let slot = self.parts.insert(flush);
        self.waiting.push_front(WAITING, slot);
    }

    /// Cancels the subrequests of a queue's request. Sent writes become orphans; if the disk has
    /// too many orphans, they are not cancelled. Returns the number of cancelled subrequests and
    /// their bytes.
    pub(crate) fn cancel(&mut self, user: u32, task: u32, shared: &Shared) -> (u32, u64) {
        let mut sum = (0, 0);
        for slot in self.parts.of(user, task) {
            let Some(len) = self.parts.get(slot).map(|part| part.len) else { continue };
            if self.drop_subrequest(slot, shared) {
                sum = (sum.0 + 1, sum.1 + u64::from(len));
            }
        }
        sum
    }

    /// Cancels a subrequest. One that was not sent is removed. One that was sent loses its owner,
    /// so that its reply is ignored; a write also becomes an orphan. Returns false without effect
    /// if the disk has too many orphans for that.
    fn drop_subrequest(&mut self, slot: u32, shared: &Shared) -> bool {
        match self.parts.get_mut(slot) {
            Some(part) if part.is_sent => {
                if part.changes() && part.orphan.is_none() {
                    let orphan = shared.orphans.adopt(part.offset, part.len.into());
                    let Some(orphan) = orphan else { return false };
                    part.orphan = Some(orphan);
                    // The reconnection thread is woken to receive the reply, because the queue may
                    // be closed before.
                    shared.wake.signal();
                }
                self.parts.disown(slot);
            }
            _ => {
                self.waiting.remove(slot);
                if let Some(part) = self.parts.remove(slot) {
                    self.recycle(part.data);
                }
            }
        }
        true
    }

    /// Returns the socket if replies are awaited that no queue may receive: replies to orphans, or
    /// to an automatic flush. The flag is true if some requests are not completely sent yet.
    pub(crate) fn unattended(&self) -> Option<(Stream, bool)> {
        let is_unattended = |part: &Subrequest| part.orphan.is_some() || part.is_automatic;
        self.busy().filter(|_| self.parts.any(is_unattended))
    }

    /// Installs a new connection, and sends waiting subrequests.
    pub(crate) fn install(&mut self, stream: Stream, export: &Export, shared: &Shared) {
        for user in self.users.iter().flatten() {
            if let Err(error) = user.watch(stream.as_fd()) {
                warn!("{}: a queue cannot watch its connection: {error}", shared.name);
            }
        }
        self.connection = Some(Connection {
            stream,
            receiver: Receiver::new(export.structured, export.allocation),
            sending: VecDeque::new(),
            sent: 0,
            is_blocked: false,
        });
        self.pump(shared, None);
    }

    /// Sends waiting subrequests, until a limit of the requests in flight is reached or the socket
    /// buffer is full.
    pub(crate) fn pump(&mut self, shared: &Shared, mut caller: Option<CallerResults<'_>>) {
        let outcome = self.begin(shared).and_then(|()| self.send());
        if let Err(loss) = outcome {
            // Replies that the server sent before it closed the connection are still valid.
            let lost = match loss {
                Loss::Socket(Errno::PIPE | Errno::CONNRESET) => {
                    self.take(shared, &mut caller).err()
                }
                _ => None,
            };
            self.set_lost(shared, &lost.unwrap_or(loss), caller);
        }
    }

    /// Moves waiting subrequests to the send queue, up to `WINDOW` and `WINDOW_BYTES` in flight.
    fn begin(&mut self, shared: &Shared) -> Result<(), Loss> {
        if self.connection.is_none() || shared.is_recovering() {
            return Ok(());
        }
        while let Some(slot) = self.waiting.first(WAITING) {
            let Some(part) = self.parts.get_mut(slot) else {
                self.waiting.remove(slot);
                continue;
            };
            let cost = part.cost();
            let room = self.in_flight < WINDOW && self.bytes + cost <= WINDOW_BYTES;
            if !room && self.in_flight != 0 {
                break;
            }
            if part.command == command::FLUSH || part.changes() {
                let mut unflushed = shared.unflushed.lock();
                if part.command == command::FLUSH {
                    part.flushes = unflushed.next_number();
                } else if unflushed.is_full() {
                    unflushed.is_waited_for = true;
                    break;
                }
            }
            part.is_sent = true;
            self.waiting.remove(slot);
            self.in_flight += 1;
            self.bytes += cost;
            let request = self.parts.request(slot).map(|request| request.encode());
            if let (Some(Ok(head)), Some(connection)) =
                (request.map(<[u8; wire::Request::SIZE]>::try_from), &mut self.connection)
            {
                connection.sending.push_back((slot, head));
            }
        }
        Ok(())
    }

    fn send(&mut self) -> Result<(), Loss> {
        let Self { connection: Some(connection), parts, users, .. } = self else { return Ok(()) };
        let mut is_blocked = false;
        while !connection.sending.is_empty() && !is_blocked {
            let mut slices = [IoSlice::new(&[]); 2 * BATCH];
            let mut used = 0;
            let mut skip = connection.sent;
            let frames = || connection.sending.iter().take(BATCH);
            for (slot, head) in frames() {
                let data = match parts.get(*slot) {
                    Some(part) if part.command == command::WRITE => &part.data[..],
                    _ => &[],
                };
                for bytes in [&head[..], data] {
                    let left = bytes.get(skip.min(bytes.len())..).unwrap_or_default();
                    skip -= bytes.len() - left.len();
                    if !left.is_empty()
                        && let Some(slice) = slices.get_mut(used)
                    {
                        *slice = IoSlice::new(left);
                        used += 1;
                    }
                }
            }
            match connection.stream.send(slices.get(..used).unwrap_or_default()) {
                Ok(count) => connection.sent += count,
                Err(Errno::AGAIN) => is_blocked = true,
                Err(errno) => return Err(errno.into()),
            }
            while let Some((slot, head)) = connection.sending.front() {
                let data = match parts.get(*slot) {
                    Some(part) if part.command == command::WRITE => part.data.len(),
                    _ => 0,
                };
                if connection.sent < head.len() + data {
                    break;
                }
                connection.sent -= head.len() + data;
                connection.sending.pop_front();
            }
        }
        if is_blocked != connection.is_blocked {
            connection.is_blocked = is_blocked;
            for user in users.iter().flatten() {
                user.watch_room(connection.stream.as_fd(), is_blocked);
            }
        }
        Ok(())
    }

    /// Receives all available replies. Completions of the queue `caller` are added to its list, and
    /// completions of other queues to their completion queues.
    pub(crate) fn receive(&mut self, shared: &Shared, mut caller: Option<CallerResults<'_>>) {
        if self.in_flight == 0 {
            return;
        }
        if let Err(loss) = self.take(shared, &mut caller) {
            self.set_lost(shared, &loss, caller);
        }
    }

    /// Handles a hang-up: processes the replies received before it, then ends the connection.
    pub(crate) fn hung_up(&mut self, shared: &Shared) {
        let loss = self.take(shared, &mut None).err().unwrap_or(Loss::End);
        self.set_lost(shared, &loss, None);
    }

    fn take(
        &mut self,
        shared: &Shared,
        caller: &mut Option<CallerResults<'_>>,
    ) -> Result<(), Loss> {
        let mut ended = Vec::new();
        let outcome = loop {
            let Some(connection) = &mut self.connection else { break Ok(()) };
            let (first, rest) = connection.receiver.room(&mut self.parts);
            let (first_len, room) = (first.len(), first.len() + rest.len());
            let count = match connection.stream.receive(first, rest) {
                Ok(0) => break Err(Loss::End),
                Ok(count) => count,
                Err(Errno::AGAIN) => break Ok(()),
                Err(errno) => break Err(errno.into()),
            };
            connection.receiver.received(count, first_len);
            let done = |part, error| ended.push((part, error));
            let outcome = connection.receiver.advance(&mut self.parts, done);
            if let Err(violation) = outcome {
                break Err(violation.into());
            }
            // A short read means that the socket buffer is empty.
            if count < room {
                break Ok(());
            }
        };
        let mut is_ending = false;
        for (part, error) in ended {
            self.in_flight -= 1;
            self.bytes -= part.cost();
            if error == wire::NbdError::Shutdown as u32 {
                // The server is shutting down and has not executed the request. So the request is
                // sent again on the next connection. This connection is not closed before its other
                // requests have ended.
                is_ending = true;
                self.resubmit(part, shared);
                continue;
            }
            self.finish(part, error, shared, caller);
        }
        if is_ending {
            shared.server_ends();
        }
        outcome
    }

    /// Returns a subrequest to the waiting list. A subrequest without an owner that does not change
    /// the export is dropped instead. An automatic flush is dropped too, and a new flush is
    /// requested.
    fn resubmit(&mut self, mut part: Subrequest, shared: &Shared) {
        if part.is_automatic {
            shared.unflushed.lock().flush = Flush::Requested;
        }
        if part.owner.is_none() && !part.changes() {
            return self.recycle(part.data);
        }
        part.restart();
        let number = part.number;
        let slot = self.parts.insert(part);
        if let Some(part) = self.parts.get_mut(slot) {
            part.number = number;
        }
        self.waiting.push_front(WAITING, slot);
    }

    fn finish(
        &mut self,
        part: Subrequest,
        mut error: u32,
        shared: &Shared,
        caller: &mut Option<CallerResults<'_>>,
    ) {
        let Subrequest { command, flags, offset, len, mut data, owner, flushes, .. } = part;
        // The orphan is dropped at the end of this function, after the write was recorded, because
        // that starts requests that wait for it.
        let (_orphan, is_automatic) = (part.orphan, part.is_automatic);
        let changes = matches!(command, command::WRITE | command::WRITE_ZEROES | command::TRIM);
        if changes && error == 0 {
            shared.is_full.store(false, Ordering::Relaxed);
            let mut unflushed = shared.unflushed.lock();
            if unflushed.must_record(flags) {
                let data = Arc::new(std::mem::take(&mut data));
                unflushed.add(Entry { command, flags, offset, len, data });
                shared.flush_soon(&mut unflushed);
            }
        }
        if command == command::FLUSH {
            let mut unflushed = shared.unflushed.lock();
            if is_automatic {
                unflushed.flush = Flush::None;
            }
            let can_continue = error == 0 && unflushed.flushed(flushes);
            // An error of a flush without an owner (automatic or cancelled) cannot be reported to a
            // request. So it counts as a loss of the unflushed writes.
            let is_lost = error != 0 && owner.is_none();
            // The flush was submitted before the loss of writes that it has to make durable.
            if error == 0 && unflushed.has_lost_writes {
                error = wire::NbdError::Io as u32;
            }
            // A loss discards the unflushed writes, so no further flush is needed.
            if !is_lost {
                shared.flush_soon(&mut unflushed);
            }
            drop(unflushed);
            if is_lost {
                shared.set_lost();
            }
            if can_continue {
                shared.wake_users();
            }
        }
        if let Some(owner) = owner {
            let reads = command == command::READ;
            let end = offset.saturating_add(len.into());
            let beyond = end > shared.export.lock().size;
            let result = if error == 0 { Ok(()) } else { Err(status(error, reads, beyond)) };
            if result == Err(DiskError::NoSpace) {
                shared.is_full.store(true, Ordering::Relaxed);
            }
            let Owner { user, task, at } = owner;
            let returns_data = reads || command == command::BLOCK_STATUS;
            let data = if returns_data { std::mem::take(&mut data) } else { Vec::new() };
            let ended = SubrequestResult { task, at, len, result, data };
            match caller {
                Some((number, into)) if *number == user => into.push(ended),
                _ => {
                    if let Some(Some(user)) = self.users.get(user as usize) {
                        user.completions.push(ended);
                    }
                }
            }
        }
        self.recycle(data);
    }

    /// Closes the connection by `NBD_CMD_DISC`, unless requests are in flight, so that a server
    /// that is shutting down need not wait for this client. Waiting subrequests are sent on the
    /// next connection.
    pub(crate) fn disconnect(&mut self) {
        let Some(connection) = self.connection.take_if(|_| self.in_flight == 0) else { return };
        for user in self.users.iter().flatten() {
            user.forget(connection.stream.as_fd());
        }
        connection.stream.send_disconnect();
        connection.stream.shut_down();
    }

    /// Closes the connection. Requests in flight are sent again on the next connection.
    pub(crate) fn set_lost(
        &mut self,
        shared: &Shared,
        loss: &Loss,
        mut caller: Option<CallerResults<'_>>,
    ) {
        let Some(connection) = self.connection.take() else { return };
        for user in self.users.iter().flatten() {
            user.forget(connection.stream.as_fd());
        }
        connection.stream.shut_down();
        let is_broken = matches!(loss, Loss::Violation(_));
        let sent = self.parts.all(|part| part.is_sent);
        warn!("{}: {loss}; {} requests wait for the next connection", shared.name, sent.len());
        (self.in_flight, self.bytes) = (0, 0);
        if sent.iter().any(|slot| self.parts.get(*slot).is_some_and(Subrequest::changes)) {
            shared.writes_lost();
        }
        // The order is reversed, because each subrequest is put in front of all waiting ones. So
        // the original order is restored.
        for slot in sent.into_iter().rev() {
            let Some(part) = self.parts.get_mut(slot) else { continue };
            part.breaks += u32::from(is_broken);
            if part.is_automatic {
                shared.unflushed.lock().flush = Flush::Requested;
            }
            // A cancelled read is dropped. A cancelled write is sent again, because the server may
            // already have executed a part of it.
            if part.owner.is_none() && !part.changes() {
                if let Some(part) = self.parts.remove(slot) {
                    self.recycle(part.data);
                }
            } else if part.breaks >= MAX_BREAKS {
                if let Some(part) = self.parts.remove(slot) {
                    let error = wire::NbdError::Io as u32;
                    self.finish(part, error, shared, &mut caller);
                }
            } else {
                part.restart();
                self.waiting.push_front(WAITING, slot);
            }
        }
        shared.connection_lost();
    }
}

/// Converts an error of the server.
fn status(error: u32, reads: bool, beyond: bool) -> DiskError {
    let is = |number: wire::NbdError| error == number as u32;
    if beyond && (is(wire::NbdError::Inval) || is(wire::NbdError::NoSpc)) {
        return DiskError::OutOfRange;
    }
    match error {
        _ if is(wire::NbdError::NoSpc) && !reads => DiskError::NoSpace,
        _ if is(wire::NbdError::Perm) && !reads => DiskError::ReadOnly,
        _ if is(wire::NbdError::NotSup) => DiskError::Unsupported,
        // Error numbers of the NBD protocol equal those of Linux.
        1..=4095 => DiskError::Io(error as i32),
        _ => DiskError::Io(libc::EIO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nbd_errors_are_converted_to_disk_errors() {
        for (error, reads, beyond, expected) in [
            (28, false, false, DiskError::NoSpace),
            (28, true, false, DiskError::Io(28)),
            (28, false, true, DiskError::OutOfRange),
            (22, true, true, DiskError::OutOfRange),
            (22, true, false, DiskError::Io(22)),
            (1, false, false, DiskError::ReadOnly),
            (1, true, false, DiskError::Io(1)),
            (95, false, false, DiskError::Unsupported),
            (5, true, true, DiskError::Io(5)),
            (u32::MAX, true, false, DiskError::Io(5)),
        ] {
            assert_eq!(status(error, reads, beyond), expected, "{error}");
        }
    }
}
