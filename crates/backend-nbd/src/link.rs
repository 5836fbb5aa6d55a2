//! A connection, and the requests that are on their way by it. Whoever has the lock sends and
//! receives what is there, for all queues that use it, and never waits.

use crate::export::Export;
use crate::journal::{Entry, Flush};
use crate::part::{Owner, Part, Parts};
use crate::receiver::Receiver;
use crate::shared::Shared;
use crate::stream::Stream;
use crate::user::{Ended, User};
use rustix::io::Errno;
use shadowbell_backend::{DiskError, Lists};
use shadowbell_nbd::wire::{self, command};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::warn;

/// The list of parts that wait.
const WAITING: u32 = 0;

/// Requests that the server has at once, and bytes of data that they have.
const WINDOW: usize = 256;
const WINDOW_BYTES: usize = 16 << 20;
/// Requests that are sent with one call.
const BATCH: usize = 64;
/// A request during which the server broke the protocol so often is given up.
const MAX_BREAKS: u32 = 4;
/// Buffers that are kept, of each size.
const KEPT: usize = 64;
/// The sizes of buffers, in bytes.
const SIZES: [usize; 3] = [4 << 10, 32 << 10, 256 << 10];

/// Why a connection is over.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Loss {
    #[error("the server hung up")]
    End,
    #[error("the server is about to end")]
    Shutdown,
    #[error("the connection broke: {0}")]
    Socket(#[from] Errno),
    #[error("the server breaks the protocol: {0}")]
    Violation(#[from] crate::receiver::Violation),
    #[error("the server does not answer on one connection, while another was lost")]
    Silent,
}

/// A queue that receives: its number on the connection, and where what has ended of it goes.
pub(crate) type Own<'a> = (u32, &'a mut Vec<Ended>);

struct Connection {
    stream: Stream,
    receiver: Receiver,
    /// Requests in the order in which they are sent, of which the first may be under way.
    sending: VecDeque<(u32, [u8; wire::Request::SIZE])>,
    /// Bytes of the first that were sent.
    sent: usize,
    /// The queues wait for the socket to take more.
    is_blocked: bool,
}

#[derive(Default)]
pub(crate) struct Link {
    connection: Option<Connection>,
    parts: Parts,
    /// Those that were not sent, in order.
    waiting: Lists,
    /// What the server has, and how many bytes of data.
    in_flight: usize,
    bytes: usize,
    users: Vec<Option<Arc<User>>>,
    buffers: [Vec<Vec<u8>>; SIZES.len()],
}

impl Link {
    /// Adds a queue; its number here.
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

    /// A queue is gone, and with it what was not sent.
    pub(crate) fn leave(&mut self, user: u32) {
        for slot in self.parts.all(|part| part.owner.is_some_and(|owner| owner.user == user)) {
            self.drop_part(slot);
        }
        if let Some(place) = self.users.get_mut(user as usize) {
            *place = None;
        }
    }

    /// How many queues there are.
    pub(crate) fn users(&self) -> usize {
        self.users.iter().flatten().count()
    }

    pub(crate) fn is_connected(&self) -> bool {
        self.connection.is_some()
    }

    /// The socket, if something is on its way by it or is still to be sent.
    pub(crate) fn busy(&self) -> Option<(Stream, bool)> {
        let connection = self.connection.as_ref().filter(|_| self.in_flight != 0)?;
        Some((connection.stream.clone(), !connection.sending.is_empty()))
    }

    pub(crate) fn stream(&self) -> Option<Stream> {
        Some(self.connection.as_ref()?.stream.clone())
    }

    /// A buffer of `len` bytes.
    pub(crate) fn buffer(&mut self, len: usize) -> Vec<u8> {
        let class = SIZES.iter().zip(&mut self.buffers).find(|(size, _)| len <= **size);
        let mut buffer = match class {
            Some((size, kept)) => kept.pop().unwrap_or_else(|| Vec::with_capacity(*size)),
            None => Vec::with_capacity(len),
        };
        buffer.resize(len, 0);
        buffer
    }

    /// A buffer is not needed any more.
    pub(crate) fn give_back(&mut self, buffer: Vec<u8>) {
        let class =
            SIZES.iter().zip(&mut self.buffers).find(|(size, _)| buffer.capacity() == **size);
        if let Some((_, kept)) = class
            && kept.len() < KEPT
        {
            kept.push(buffer);
        }
    }

    /// Adds a part, to be sent by [`pump`](Self::pump).
    pub(crate) fn push(&mut self, part: Part) {
        let slot = self.parts.insert(part);
        self.waiting.push_back(WAITING, slot);
    }

    /// Adds a flush of the disk's own, before everything else.
    pub(crate) fn push_flush(&mut self) {
        let slot = self.parts.insert(Part::new(command::FLUSH, 0, 0, 0, Vec::new()));
        self.waiting.push_front(WAITING, slot);
    }

    /// Takes back what of a queue's request can be taken back: what was not sent, and reads, whose
    /// answers are not looked at then. How many parts these are, and of how many bytes.
    pub(crate) fn cancel(&mut self, user: u32, task: u32) -> (u32, u64) {
        let mut sum = (0, 0);
        for slot in self.parts.of(user, task) {
            if let Some(part) = self.parts.get(slot)
                && (!part.is_sent || part.is_read())
            {
                sum = (sum.0 + 1, sum.1 + u64::from(part.len));
                self.drop_part(slot);
            }
        }
        sum
    }

    /// Forgets a part, as far as the server does not have it.
    fn drop_part(&mut self, slot: u32) {
        match self.parts.get_mut(slot) {
            Some(part) if part.is_sent => self.parts.disown(slot),
            _ => {
                self.waiting.remove(slot);
                if let Some(part) = self.parts.remove(slot) {
                    self.give_back(part.data);
                }
            }
        }
    }

    /// Begins to use a connection, and sends what waits.
    pub(crate) fn install(&mut self, stream: Stream, export: &Export, shared: &Shared) {
        for user in self.users.iter().flatten() {
            if let Err(error) = user.watch(stream.as_fd()) {
                warn!("{}: a queue is not woken by its connection: {error}", shared.name);
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

    /// Sends what waits, as far as the server and the socket take it.
    pub(crate) fn pump(&mut self, shared: &Shared, mut own: Option<Own<'_>>) {
        let outcome = self.begin(shared).and_then(|()| self.send());
        if let Err(loss) = outcome {
            // What it has answered before it hung up still counts.
            let lost = match loss {
                Loss::Socket(Errno::PIPE | Errno::CONNRESET) => self.take(shared, &mut own).err(),
                _ => None,
            };
            self.lose(shared, &lost.unwrap_or(loss), own);
        }
    }

    /// Puts what waits among what is sent, as far as there is room.
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
                let mut journal = shared.journal.lock();
                if part.command == command::FLUSH {
                    part.flushes = journal.end();
                } else if journal.is_full() {
                    journal.is_waited_for = true;
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

    /// Takes what the server has answered, all that is there. What ends of the queue `own` goes to
    /// it, and what ends of others to them.
    pub(crate) fn receive(&mut self, shared: &Shared, mut own: Option<Own<'_>>) {
        if self.in_flight == 0 {
            return;
        }
        if let Err(loss) = self.take(shared, &mut own) {
            self.lose(shared, &loss, own);
        }
    }

    /// The other end has hung up: what it has answered before counts, and then it is over.
    pub(crate) fn hung_up(&mut self, shared: &Shared) {
        let loss = self.take(shared, &mut None).err().unwrap_or(Loss::End);
        self.lose(shared, &loss, None);
    }

    fn take(&mut self, shared: &Shared, own: &mut Option<Own<'_>>) -> Result<(), Loss> {
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
            // Less than there was room for: there is no more.
            if count < room {
                break Ok(());
            }
        };
        let mut is_ending = false;
        for (part, error) in ended {
            self.in_flight -= 1;
            self.bytes -= part.cost();
            if error == wire::NbdError::Shutdown as u32 {
                // It was not carried out, and waits for a server that does.
                is_ending = true;
                self.again(part);
                continue;
            }
            self.finish(part, error, shared, own);
        }
        if is_ending { outcome.and(Err(Loss::Shutdown)) } else { outcome }
    }

    /// Puts a part back among those that wait; one that nobody wants is forgotten.
    fn again(&mut self, mut part: Part) {
        if part.owner.is_none() && !part.changes() {
            return self.give_back(part.data);
        }
        part.begin_again();
        let number = part.number;
        let slot = self.parts.insert(part);
        if let Some(part) = self.parts.get_mut(slot) {
            part.number = number;
        }
        self.waiting.push_front(WAITING, slot);
    }

    fn finish(&mut self, part: Part, error: u32, shared: &Shared, own: &mut Option<Own<'_>>) {
        let Part { command, flags, offset, len, mut data, owner, flushes, .. } = part;
        let changes = matches!(command, command::WRITE | command::WRITE_ZEROES | command::TRIM);
        if changes && error == 0 {
            shared.is_full.store(false, Ordering::Relaxed);
            let mut journal = shared.journal.lock();
            if journal.keeps(flags) {
                let data = Arc::new(std::mem::take(&mut data));
                journal.add(Entry { command, flags, offset, len, data });
                shared.flush_soon(&mut journal);
            }
        }
        if command == command::FLUSH {
            let mut journal = shared.journal.lock();
            if owner.is_none() {
                journal.flush = Flush::None;
            }
            let goes_on = error == 0 && journal.flushed(flushes);
            // Nobody else would say so.
            let is_lost = error != 0 && owner.is_none();
            shared.flush_soon(&mut journal);
            drop(journal);
            if is_lost {
                shared.lose();
            }
            if goes_on {
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
            let gives = reads || command == command::BLOCK_STATUS;
            let data = if gives { std::mem::take(&mut data) } else { Vec::new() };
            let ended = Ended { task, at, len, result, data };
            match own {
                Some((number, into)) if *number == user => into.push(ended),
                _ => {
                    if let Some(Some(user)) = self.users.get(user as usize) {
                        user.push(ended);
                    }
                }
            }
        }
        self.give_back(data);
    }

    /// The connection is over: what the server had waits for the next one.
    pub(crate) fn lose(&mut self, shared: &Shared, loss: &Loss, mut own: Option<Own<'_>>) {
        let Some(connection) = self.connection.take() else { return };
        for user in self.users.iter().flatten() {
            user.forget(connection.stream.as_fd());
        }
        connection.stream.end();
        let is_broken = matches!(loss, Loss::Violation(_));
        let sent = self.parts.all(|part| part.is_sent);
        warn!("{}: {loss}; {} requests wait for the next connection", shared.name, sent.len());
        (self.in_flight, self.bytes) = (0, 0);
        // In front of what waits, so the last one first.
        for slot in sent.into_iter().rev() {
            let Some(part) = self.parts.get_mut(slot) else { continue };
            part.breaks += u32::from(is_broken);
            let is_own_flush = part.command == command::FLUSH && part.owner.is_none();
            if is_own_flush {
                shared.journal.lock().flush = Flush::Wanted;
            }
            // A write that nobody waits for may have been carried out, and is again.
            if part.owner.is_none() && !part.changes() {
                if let Some(part) = self.parts.remove(slot) {
                    self.give_back(part.data);
                }
            } else if part.breaks >= MAX_BREAKS {
                if let Some(part) = self.parts.remove(slot) {
                    let error = wire::NbdError::Io as u32;
                    self.finish(part, error, shared, &mut own);
                }
            } else {
                part.begin_again();
                self.waiting.push_front(WAITING, slot);
            }
        }
        shared.lost();
    }
}

/// An error of the server's as one of a disk.
fn status(error: u32, reads: bool, beyond: bool) -> DiskError {
    let is = |number: wire::NbdError| error == number as u32;
    if beyond && (is(wire::NbdError::Inval) || is(wire::NbdError::NoSpc)) {
        return DiskError::OutOfRange;
    }
    match error {
        _ if is(wire::NbdError::NoSpc) && !reads => DiskError::NoSpace,
        _ if is(wire::NbdError::Perm) && !reads => DiskError::ReadOnly,
        _ if is(wire::NbdError::NotSup) => DiskError::Unsupported,
        // The numbers of the protocol are Linux's.
        1..=4095 => DiskError::Io(error as i32),
        _ => DiskError::Io(libc::EIO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_meaning_that_they_have_there() {
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
