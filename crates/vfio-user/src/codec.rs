//! Decoder and send queue of a connection, without its socket.
//!
//! A byte stream has no message boundaries, and descriptors are received separately from the bytes.
//! [`Decoder`] restores messages and their descriptors; its memory is bounded, whatever the peer
//! sends. [`SendQueue`] stores messages until the socket has accepted them.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;

use serde::{Deserialize, Serialize};
use shadowbell_state::{Bytes, Descriptors, FdRef, StateError};
use zerocopy::{FromBytes, IntoBytes};

use crate::Errno;
use crate::descriptor::Descriptor;
use crate::wire::{HEADER_LEN, Header, header_flags};

/// Maximum number of descriptors in one message. A message with more descriptors ends the
/// connection. A message with fewer, but more than the negotiated number
/// ([`MAX_MSG_FDS`](crate::server::MAX_MSG_FDS)), is refused.
pub const MAX_MESSAGE_FDS: usize = 32;

/// Maximum size of the parts of a message that are not transferred data: headers, and the JSON of
/// VERSION.
pub const MESSAGE_OVERHEAD: usize = 4096;

/// Size of the receive buffer in bytes. The buffer holds several messages. For a larger message,
/// the buffer grows until the message is decoded.
const BUFFER_LEN: usize = 16 * 1024;

/// Error of an undecodable stream, after which the connection is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The size in a header is less than the header's own size.
    #[error("a message of {size} bytes is shorter than its own header")]
    TooShort {
        /// Size in the header.
        size: u32,
    },
    /// The size in a header exceeds the negotiated maximum.
    #[error("a message of {size} bytes exceeds the limit of {max} bytes")]
    TooLong {
        /// Size in the header.
        size: u32,
        /// Maximum size.
        max: usize,
    },
    /// The type bits in a header are neither those of a command nor of a reply.
    #[error("message flags {flags:#x} are neither those of a command nor of a reply")]
    UnknownType {
        /// Flags in the header.
        flags: u32,
    },
    /// A message has more than [`MAX_MESSAGE_FDS`] descriptors.
    #[error("a message has more than {MAX_MESSAGE_FDS} descriptors")]
    TooManyFds,
}

/// Decoded message.
#[derive(Debug)]
pub struct Message<'a> {
    /// Header.
    pub header: Header,
    /// Bytes after the header.
    pub payload: &'a [u8],
    /// Received descriptors. When the message is dropped, the descriptors that were not taken are
    /// closed.
    pub fds: Vec<Descriptor>,
}

/// Descriptors from one receive call, and the stream position after the bytes from that call.
#[derive(Debug)]
struct Batch {
    end: u64,
    fds: Vec<Descriptor>,
}

/// Serialized [`SendQueue`].
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct SavedQueue {
    bytes: Bytes,
    /// Descriptors of each message, and the offset of the message in `bytes`.
    #[serde(default)]
    fds: Vec<(usize, FdRef)>,
}

/// Decoder of messages from the bytes and descriptors that a socket receives.
#[derive(Debug)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// Stream position of `buffer[start]`: number of decoded bytes of the connection.
    position: u64,
    batches: VecDeque<Batch>,
    pending_fds: usize,
    max_message: usize,
    failed: Option<DecodeError>,
}

impl Decoder {
    /// Creates a decoder for messages that transfer at most `max_data_xfer_size` bytes.
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

    /// Buffer for the next receive call. The caller must pass the result of that call to
    /// [`advance`](Self::advance). The buffer is not empty if the caller has called
    /// [`decode`](Self::decode) until it returned `None`.
    pub fn space(&mut self) -> &mut [u8] {
        let buffered = self.end - self.start;
        if buffered == 0 {
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
            self.end = buffered;
            if wanted > self.buffer.len() {
                self.buffer.resize(wanted, 0);
            }
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }

    /// Adds the result of one receive call: `len` bytes in [`space`](Self::space), and `fds`.
    ///
    /// Must be called once per receive call. The kernel ends a receive after data that have
    /// descriptors. So the descriptors belong to the message that contains the last received byte.
    pub fn advance(&mut self, len: usize, fds: Vec<Descriptor>) {
        self.end = self.end.saturating_add(len).min(self.buffer.len());
        if fds.is_empty() {
            return;
        }
        // If the current message ends before the new bytes, the new descriptors belong to a later
        // message.
        let buffered = self.end - self.start;
        let is_next = self.header().is_some_and(|header| (header.size as usize) < buffered);
        let before = if is_next { 0 } else { self.pending_fds };
        self.pending_fds += fds.len();
        if before + fds.len() > MAX_MESSAGE_FDS {
            self.fail(DecodeError::TooManyFds);
            return;
        }
        let end = self.position + (self.end - self.start) as u64;
        self.batches.push_back(Batch { end, fds });
    }

    /// Returns the next message if it is complete.
    ///
    /// # Errors
    ///
    /// The stream is undecodable. Every later call returns the same error.
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

    /// True if [`decode`](Self::decode) would return a message or an error.
    pub(crate) fn has_message(&self) -> bool {
        let is_complete = |header: Header| {
            self.buffered() >= header.size as usize || header.size as usize > self.max_message
        };
        self.failed.is_some() || self.header().is_some_and(is_complete)
    }

    /// Header and payload of the message that [`decode`](Self::decode) would return, if it is
    /// complete and no descriptors are pending.
    pub fn peek(&self) -> Option<(Header, &[u8])> {
        let header = self.header()?;
        let payload = self.buffer.get(self.start..self.end)?.get(HEADER_LEN..header.size as usize);
        let is_sound = self.failed.is_none()
            && header.size as usize <= self.max_message
            && header.flags & header_flags::TYPE_MASK <= header_flags::REPLY
            && self.batches.is_empty();
        Some((header, payload?)).filter(|_| is_sound)
    }

    /// True if received bytes are left. If [`decode`](Self::decode) has returned `None`, they are
    /// an incomplete message.
    pub fn is_partial(&self) -> bool {
        self.start != self.end
    }

    /// Number of bytes that were decoded.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Last `len` bytes that were decoded. The result is valid only directly after
    /// [`decode`](Self::decode).
    pub(crate) fn consumed(&self, len: usize) -> &[u8] {
        let begin = self.start.saturating_sub(len);
        self.buffer.get(begin..self.start).unwrap_or_default()
    }

    /// Buffer for the next receive, as [`space`](Self::space) returns it, with at least `room`
    /// bytes.
    pub(crate) fn space_of(&mut self, room: usize) -> &mut [u8] {
        let _ = self.space();
        let buffered = self.buffered();
        if self.buffer.len() - self.end < room {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, buffered);
            if self.buffer.len() < buffered + room {
                self.buffer.resize(buffered + room, 0);
            }
        }
        self.buffer.get_mut(self.end..).unwrap_or_default()
    }

    /// Number of bytes that were received and not decoded yet.
    pub(crate) fn buffered(&self) -> usize {
        self.end - self.start
    }

    fn header(&self) -> Option<Header> {
        let buffered = self.buffer.get(self.start..self.end)?;
        Header::read_from_prefix(buffered).ok().map(|(header, _)| header)
    }

    /// Takes the descriptors of the message that ends at the current position. If a receive also
    /// returned the start of the next message, the descriptors of that receive belong to the next
    /// message.
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

/// Queue of messages to send, with their descriptors.
#[derive(Debug, Default)]
pub struct SendQueue {
    bytes: Vec<u8>,
    sent: usize,
    /// Descriptors of each message, and the offset of the message in `bytes`.
    fds: VecDeque<(usize, OwnedFd)>,
}

impl SendQueue {
    /// True if no bytes are queued.
    pub fn is_empty(&self) -> bool {
        self.sent == self.bytes.len()
    }

    /// Number of queued bytes.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Queues a message. The size in `header` is filled in.
    pub fn put(&mut self, mut header: Header, payload: &[&[u8]]) {
        let len = HEADER_LEN + payload.iter().map(|part| part.len()).sum::<usize>();
        header.size = u32::try_from(len).unwrap_or(u32::MAX);
        self.bytes.extend_from_slice(header.as_bytes());
        for part in payload {
            self.bytes.extend_from_slice(part);
        }
    }

    /// Queues the reply to `to`, unless NO_REPLY is set.
    pub fn put_reply(&mut self, to: &Header, payload: &[&[u8]]) {
        if !to.no_reply() {
            self.put(reply_header(to), payload);
        }
    }

    /// Queues the reply to `to` with descriptors, unless NO_REPLY is set.
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

    /// Queues a reply to `to`. Its payload is `head` and `len` bytes that `fill` writes into the
    /// queue. If `fill` fails, an error reply is queued instead.
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

    /// Queues an error reply to `to`, unless NO_REPLY is set. QEMU would treat the error number 0
    /// as success, but an [`Errno`] is never 0.
    pub fn put_error(&mut self, to: &Header, errno: Errno) {
        if to.no_reply() {
            return;
        }
        let mut header = reply_header(to);
        header.flags |= header_flags::ERROR;
        header.error = errno.raw_os_error().unsigned_abs();
        self.put(header, &[]);
    }

    /// Serializes the queue.
    pub(crate) fn save(&self, fds: &mut Descriptors) -> io::Result<SavedQueue> {
        let bytes = Bytes(self.bytes.get(self.sent..).unwrap_or_default().to_vec());
        let add = |(at, fd): &(usize, OwnedFd)| Ok((*at - self.sent, fds.add(fd.try_clone()?)));
        Ok(SavedQueue { bytes, fds: self.fds.iter().map(add).collect::<io::Result<_>>()? })
    }

    /// Restores a queue of [`save`](Self::save).
    pub(crate) fn restore(saved: SavedQueue, fds: &mut Descriptors) -> Result<Self, StateError> {
        let SavedQueue { bytes: Bytes(bytes), fds: with } = saved;
        let take = |(at, fd)| fds.take(fd).map(|fd| (at, fd));
        Ok(Self { bytes, sent: 0, fds: with.into_iter().map(take).collect::<Result<_, _>>()? })
    }

    /// Next bytes to send, and the descriptors to send with the first of them.
    pub fn front(&self) -> (&[u8], impl Iterator<Item = &OwnedFd>) {
        let next = self.fds.iter().map(|(at, _)| *at).find(|at| *at > self.sent);
        let end = next.unwrap_or(self.bytes.len());
        let with = self.fds.iter().take_while(|(at, _)| *at == self.sent).map(|(_, fd)| fd);
        (self.bytes.get(self.sent..end).unwrap_or_default(), with)
    }

    /// Removes `len` bytes of [`front`](Self::front), and its descriptors, after the socket has
    /// accepted them.
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
            // Sent bytes are also discarded if the queue is never empty. Otherwise the queue would
            // grow without limit for a peer that reads slowly.
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
