//! Bytes and descriptors in, whole messages out, and back; without a socket.
//!
//! A stream of bytes has no message boundaries, and descriptors arrive beside it. [`Decoder`] puts
//! both together again, in bounded memory, whatever a peer sends. [`SendQueue`] holds what is to be
//! sent until the socket has taken it.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shadowbell_state::{Bytes, Descriptors, FdRef, StateError};
use zerocopy::{FromBytes, IntoBytes};

use crate::Errno;
use crate::descriptor::{Closer, Descriptor, SavedDescriptor};
use crate::wire::{HEADER_LEN, Header, header_flags};

/// How many descriptors one message may bring without an end of the connection. More than was
/// agreed on is refused: see [`MAX_MSG_FDS`](crate::server::MAX_MSG_FDS).
pub const MAX_MESSAGE_FDS: usize = 32;

/// What a message may have besides the data of a transfer: headers, and the JSON of VERSION.
pub const MESSAGE_OVERHEAD: usize = 4096;

/// Room for a batch of messages that a single receive brings. What is larger gets a larger buffer
/// for as long as it lasts.
const BUFFER_LEN: usize = 16 * 1024;

/// A stream that cannot be understood any further. The connection is of no use after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The size in a header is less than that of the header.
    #[error("a message of {size} bytes is shorter than its own header")]
    TooShort {
        /// Size that the header states.
        size: u32,
    },
    /// The size in a header is more than was agreed.
    #[error("a message of {size} bytes is longer than the {max} that are allowed")]
    TooLong {
        /// Size that the header states.
        size: u32,
        /// Largest size.
        max: usize,
    },
    /// The type bits in a header are neither those of a command nor of a reply.
    #[error("message flags {flags:#x} are neither those of a command nor of a reply")]
    UnknownType {
        /// The flags that the header states.
        flags: u32,
    },
    /// One message brought too many descriptors.
    #[error("a message came with more than {MAX_MESSAGE_FDS} descriptors")]
    TooManyFds,
}

/// One whole message.
#[derive(Debug)]
pub struct Message<'a> {
    /// Its header.
    pub header: Header,
    /// What follows the header.
    pub payload: &'a [u8],
    /// The descriptors that came with it; those that are not taken out are closed with it.
    pub fds: Vec<Descriptor>,
}

/// Descriptors, and how far the stream had come when they arrived.
#[derive(Debug)]
struct Batch {
    end: u64,
    fds: Vec<Descriptor>,
}

/// What a [`Decoder`] has taken in and not handed out, on its way to another process.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct SavedDecoder {
    bytes: Bytes,
    /// Descriptors, and how many of `bytes` had come when they arrived.
    #[serde(default)]
    fds: Vec<(u64, Vec<SavedDescriptor>)>,
}

/// What a [`SendQueue`] holds, on its way to another process.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct SavedQueue {
    bytes: Bytes,
    /// Descriptors, and the offset in `bytes` of the message that they go with.
    #[serde(default)]
    fds: Vec<(usize, FdRef)>,
}

/// Puts messages together from what a socket delivers.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Position in the stream of `buffer[start]`.
    position: u64,
    batches: VecDeque<Batch>,
    pending_fds: usize,
    max_message: usize,
    failed: Option<DecodeError>,
}

impl Decoder {
    /// A decoder for messages that transfer at most `max_data_xfer_size` bytes.
    pub fn new(max_data_xfer_size: usize) -> Self {
        Self {
            buffer: vec![0; BUFFER_LEN],
            start: 0,
            end: 0,
            position: 0,
            batches: VecDeque::new(),
            pending_fds: 0,
            max_message: max_data_xfer_size.saturating_add(MESSAGE_OVERHEAD),
            failed: None,
        }
    }

    /// Where to put the next bytes. Never empty, if [`decode`](Self::decode) was called until it
    /// had no more; then follows [`advance`](Self::advance).
    pub fn space(&mut self) -> &mut [u8] {
        let held = self.end - self.start;
        if held == 0 {
            self.start = 0;
            self.end = 0;
            if self.buffer.len() > BUFFER_LEN {
                self.buffer.truncate(BUFFER_LEN);
                self.buffer.shrink_to_fit();
            }
        }
        let wanted = match self.header() {
            Some(header) => (header.size as usize).min(self.max_message),
            None => HEADER_LEN,
        };
        if self.start + wanted > self.buffer.len() || self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            self.start = 0;
            self.end = held;
            if wanted > self.buffer.len() {
                self.buffer.resize(wanted, 0);
            }
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }

    /// Says that `len` bytes were put into [`space`](Self::space), and that `fds` arrived with
    /// them.
    ///
    /// Call it once per receive: the descriptors of one receive belong to the message that its last
    /// byte belongs to, because the kernel ends a receive after data that has descriptors.
    pub fn advance(&mut self, len: usize, fds: Vec<Descriptor>) {
        self.end = self.end.saturating_add(len).min(self.buffer.len());
        if fds.is_empty() {
            return;
        }
        // If the message that is awaited ends before, these are not its own.
        let held = self.end - self.start;
        let is_next = self.header().is_some_and(|header| (header.size as usize) < held);
        let before = if is_next { 0 } else { self.pending_fds };
        self.pending_fds += fds.len();
        if before + fds.len() > MAX_MESSAGE_FDS {
            self.fail(DecodeError::TooManyFds);
            return;
        }
        let end = self.position + (self.end - self.start) as u64;
        self.batches.push_back(Batch { end, fds });
    }

    /// The next message, if all of it has arrived.
    ///
    /// # Errors
    ///
    /// The stream makes no sense. The error stays: every further call returns it.
    pub fn decode(&mut self) -> Result<Option<Message<'_>>, DecodeError> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let Some(header) = self.header() else { return Ok(None) };
        let size = header.size as usize;
        if size < HEADER_LEN {
            return Err(self.fail(DecodeError::TooShort { size: header.size }));
        }
        if size > self.max_message {
            let max = self.max_message;
            return Err(self.fail(DecodeError::TooLong { size: header.size, max }));
        }
        if header.flags & header_flags::TYPE_MASK > header_flags::REPLY {
            return Err(self.fail(DecodeError::UnknownType { flags: header.flags }));
        }
        if self.end - self.start < size {
            return Ok(None);
        }
        let begin = self.start;
        self.start += size;
        self.position += size as u64;
        let fds = self.take_fds();
        let payload = self.buffer.get(begin + HEADER_LEN..begin + size).unwrap_or_default();
        Ok(Some(Message { header, payload, fds }))
    }

    /// The message that [`decode`](Self::decode) would return, if there is one and it has no
    /// descriptors: its header and its payload.
    pub fn peek(&self) -> Option<(Header, &[u8])> {
        let header = self.header()?;
        let payload = self.buffer.get(self.start..self.end)?.get(HEADER_LEN..header.size as usize);
        let is_sound = self.failed.is_none()
            && header.size as usize <= self.max_message
            && header.flags & header_flags::TYPE_MASK <= header_flags::REPLY
            && self.batches.is_empty();
        Some((header, payload?)).filter(|_| is_sound)
    }

    /// A message has begun and is not complete (or [`decode`](Self::decode) was not asked yet).
    pub fn is_partial(&self) -> bool {
        self.start != self.end
    }

    /// How many bytes of the stream have been handed out as messages.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The last `len` bytes that were handed out as messages. Only right after
    /// [`decode`](Self::decode).
    pub(crate) fn handed_out(&self, len: usize) -> &[u8] {
        let begin = self.start.saturating_sub(len);
        self.buffer.get(begin..self.start).unwrap_or_default()
    }

    /// As [`space`](Self::space), with room for `room` bytes at least.
    pub(crate) fn space_of(&mut self, room: usize) -> &mut [u8] {
        let _ = self.space();
        let held = self.held();
        if self.buffer.len() - self.end < room {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, held);
            if self.buffer.len() < held + room {
                self.buffer.resize(held + room, 0);
            }
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }

    /// How many bytes were taken in and not handed out.
    pub(crate) fn held(&self) -> usize {
        self.end - self.start
    }

    /// What was taken in and not handed out. (A stream that makes no sense is not to be saved.)
    pub(crate) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedDecoder> {
        let bytes = self.buffer.get(self.start..self.end).unwrap_or_default().to_vec();
        let mut batches = Vec::new();
        for batch in &self.batches {
            let saved = batch.fds.iter().map(|fd| fd.save(fds)).collect::<io::Result<_>>()?;
            batches.push((batch.end - self.position, saved));
        }
        Ok(SavedDecoder { bytes: Bytes(bytes), fds: batches })
    }

    /// The other side of [`save`](Self::save).
    pub(crate) fn restore(
        saved: SavedDecoder,
        max_data_xfer_size: usize,
        fds: &mut Descriptors,
        closer: &Arc<Closer>,
    ) -> Result<Self, StateError> {
        let mut decoder = Self::new(max_data_xfer_size);
        let SavedDecoder { bytes: Bytes(bytes), fds: batches } = saved;
        decoder.end = bytes.len();
        if bytes.len() > BUFFER_LEN {
            decoder.buffer = bytes;
        } else if let Some(buffer) = decoder.buffer.get_mut(..bytes.len()) {
            buffer.copy_from_slice(&bytes);
        }
        for (end, batch) in batches {
            let restored = batch.into_iter().map(|fd| Descriptor::restore(fd, fds, closer));
            let restored = restored.collect::<Result<Vec<_>, _>>()?;
            decoder.pending_fds += restored.len();
            decoder.batches.push_back(Batch { end, fds: restored });
        }
        Ok(decoder)
    }

    fn header(&self) -> Option<Header> {
        let held = self.buffer.get(self.start..self.end)?;
        Header::read_from_prefix(held).ok().map(|(header, _)| header)
    }

    /// The descriptors that arrived with bytes before the current position. A batch that ends
    /// inside a later message is that message's.
    fn take_fds(&mut self) -> Vec<Descriptor> {
        let mut fds = Vec::new();
        while self.batches.front().is_some_and(|batch| batch.end <= self.position) {
            if let Some(batch) = self.batches.pop_front() {
                self.pending_fds -= batch.fds.len();
                if fds.is_empty() {
                    fds = batch.fds;
                } else {
                    fds.extend(batch.fds);
                }
            }
        }
        fds
    }

    fn fail(&mut self, error: DecodeError) -> DecodeError {
        self.batches.clear();
        self.pending_fds = 0;
        *self.failed.get_or_insert(error)
    }
}

/// What waits to be sent, with the descriptors that go along.
#[derive(Debug, Default)]
pub struct SendQueue {
    bytes: Vec<u8>,
    sent: usize,
    /// Descriptors, and the offset in `bytes` of the message that they go with.
    fds: VecDeque<(usize, OwnedFd)>,
}

impl SendQueue {
    /// Nothing waits.
    pub fn is_empty(&self) -> bool {
        self.sent == self.bytes.len()
    }

    /// How many bytes wait.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Adds a message. The size in `header` is filled in.
    pub fn put(&mut self, mut header: Header, payload: &[&[u8]]) {
        let len = HEADER_LEN + payload.iter().map(|part| part.len()).sum::<usize>();
        header.size = u32::try_from(len).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(header.as_bytes());
        for part in payload {
            self.bytes.extend_from_slice(part);
        }
    }

    /// Adds the reply to `to`, unless its sender wants none.
    pub fn put_reply(&mut self, to: &Header, payload: &[&[u8]]) {
        if !to.no_reply() {
            self.put(reply_header(to), payload);
        }
    }

    /// Adds the reply to `to`, with descriptors, unless its sender wants none.
    pub fn put_reply_with_fds(
        &mut self,
        to: &Header,
        payload: &[&[u8]],
        fds: impl IntoIterator<Item = OwnedFd>,
    ) {
        if !to.no_reply() {
            let at = self.bytes.len();
            self.fds.extend(fds.into_iter().map(|fd| (at, fd)));
            self.put(reply_header(to), payload);
        }
    }

    /// Adds a reply to `to` whose payload is `head` and then `len` bytes that `fill` provides in
    /// place. If it cannot, an error reply takes its place.
    pub fn put_reply_filled(
        &mut self,
        to: &Header,
        head: &[u8],
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), Errno>,
    ) {
        let begin = self.bytes.len();
        let mut header = reply_header(to);
        header.size = u32::try_from(HEADER_LEN + head.len() + len).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(head);
        let data = self.bytes.len();
        self.bytes.resize(data + len, 0);
        let outcome = fill(self.bytes.get_mut(data..).unwrap_or_default());
        if to.no_reply() {
            self.bytes.truncate(begin);
        } else if let Err(errno) = outcome {
            self.bytes.truncate(begin);
            self.put_error(to, errno);
        }
    }

    /// Adds an error reply to `to`, unless its sender wants none. The number is never 0, which
    /// QEMU would take for success: an [`Errno`] cannot be.
    pub fn put_error(&mut self, to: &Header, errno: Errno) {
        if to.no_reply() {
            return;
        }
        let mut header = reply_header(to);
        header.flags |= header_flags::ERROR;
        header.error = errno.raw_os_error().unsigned_abs();
        self.put(header, &[]);
    }

    /// What waits to be sent.
    pub(crate) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedQueue> {
        let bytes = Bytes(self.bytes.get(self.sent..).unwrap_or_default().to_vec());
        let add = |(at, fd): &(usize, OwnedFd)| Ok((*at - self.sent, fds.add(fd.try_clone()?)));
        Ok(SavedQueue { bytes, fds: self.fds.iter().map(add).collect::<io::Result<_>>()? })
    }

    /// The other side of [`save`](Self::save).
    pub(crate) fn restore(saved: SavedQueue, fds: &mut Descriptors) -> Result<Self, StateError> {
        let SavedQueue { bytes: Bytes(bytes), fds: with } = saved;
        let take = |(at, fd)| fds.take(fd).map(|fd| (at, fd));
        Ok(Self { bytes, sent: 0, fds: with.into_iter().map(take).collect::<Result<_, _>>()? })
    }

    /// What to send next: bytes, and the descriptors that go with the first of them.
    pub fn front(&self) -> (&[u8], impl Iterator<Item = &OwnedFd>) {
        let next = self.fds.iter().map(|(at, _)| *at).find(|at| *at > self.sent);
        let end = next.unwrap_or(self.bytes.len());
        let with = self.fds.iter().take_while(|(at, _)| *at == self.sent).map(|(_, fd)| fd);
        (self.bytes.get(self.sent..end).unwrap_or_default(), with)
    }

    /// Says that `len` bytes of [`front`](Self::front) are on their way, and the descriptors too.
    pub fn sent(&mut self, len: usize) {
        if len == 0 {
            return;
        }
        while self.fds.front().is_some_and(|(at, _)| *at == self.sent) {
            self.fds.pop_front();
        }
        self.sent = self.sent.saturating_add(len).min(self.bytes.len());
        if self.sent == self.bytes.len() {
            self.bytes.clear();
            self.bytes.shrink_to(BUFFER_LEN);
            self.sent = 0;
        } else if self.sent >= BUFFER_LEN && self.sent >= self.bytes.len() / 2 {
            // A peer that is always a little behind must not make what it has read pile up.
            self.bytes.drain(..self.sent);
            for (at, _) in &mut self.fds {
                *at -= self.sent;
            }
            self.sent = 0;
        }
    }
}

fn reply_header(to: &Header) -> Header {
    Header { id: to.id, command: to.command, size: 0, flags: header_flags::REPLY, error: 0 }
}

#[cfg(test)]
mod tests;
