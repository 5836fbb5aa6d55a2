//! Model of a client's stream: the messages that were sent, split as the protocol requires, and the
//! replies that are expected.

use shadowbell_vfio_user::codec::{MAX_MESSAGE_FDS, MESSAGE_OVERHEAD};
use shadowbell_vfio_user::wire::{HEADER_LEN, Header, command, header_flags};
use std::collections::VecDeque;
use zerocopy::FromBytes;

/// Maximum size of a message: the server's limit of data transfers, plus overhead.
const LONGEST: usize = (1 << 20) + MESSAGE_OVERHEAD;

#[derive(Default)]
pub(crate) struct Frames {
    written: Vec<u8>,
    /// Number of descriptors that were sent with the bytes in `written`, which are an incomplete
    /// message.
    fds: usize,
    inward: Vec<u8>,
    expected: VecDeque<Header>,
    /// True if the client has sent its first message.
    introduced: bool,
    /// True if the first message is a VERSION that the server may refuse, and whose reply has not
    /// arrived.
    unsure: bool,
    /// True if the stream is invalid, so later bytes have no effect.
    broken: bool,
    /// True if the server is allowed to disconnect this client.
    forfeit: bool,
    /// The last complete reply.
    last: Vec<u8>,
}

impl Frames {
    /// Records sent bytes.
    pub(crate) fn sent(&mut self, bytes: &[u8], fds: usize) {
        self.written.extend_from_slice(bytes);
        self.fds += fds;
        // A client that sends more descriptors than a message may have can be disconnected.
        self.forfeit |= self.fds > MAX_MESSAGE_FDS;
        while let Ok((header, _)) = Header::read_from_prefix(&self.written) {
            let size = header.size as usize;
            let kind = header.flags & header_flags::TYPE_MASK;
            let is_sound = (HEADER_LEN..=LONGEST).contains(&size) && kind == header_flags::COMMAND;
            self.broken |= !is_sound;
            if self.broken {
                return;
            }
            if self.written.len() < size {
                return;
            }
            self.written.drain(..size);
            // Descriptors that were sent with the end of one message and the start of the next
            // belong to the next one.
            self.fds = if self.written.is_empty() { 0 } else { fds };
            if !std::mem::replace(&mut self.introduced, true) {
                // Only the reply will show whether the server accepts the version.
                self.unsure = header.command == command::VERSION && !header.no_reply();
                self.forfeit |= !self.unsure;
            }
            if !header.no_reply() {
                self.expected.push_back(header);
            }
        }
    }

    /// Records received bytes.
    pub(crate) fn record_received(&mut self, bytes: &[u8]) {
        self.inward.extend_from_slice(bytes);
        while let Ok((header, _)) = Header::read_from_prefix(&self.inward) {
            let size = header.size as usize;
            assert!((HEADER_LEN..=LONGEST).contains(&size), "a reply of {size} bytes");
            if self.inward.len() < size {
                return;
            }
            let is_it =
                |expected: &Header| (header.id, header.command) == (expected.id, expected.command);
            let found = self.expected.iter().position(is_it).expect("a reply without a request");
            // A reply may come before earlier ones only if these are replies to unmaps, which wait
            // for accesses in flight.
            let mut overtaken = self.expected.iter().take(found);
            assert!(overtaken.all(|expected| expected.command == command::DMA_UNMAP), "the order");
            self.expected.remove(found);
            assert!(header.is_reply(), "no reply: {header:?}");
            let failed = header.flags & header_flags::ERROR != 0;
            assert_eq!(failed, header.error != 0, "{header:?}");
            if failed {
                assert_eq!(size, HEADER_LEN, "an error reply has no payload");
                self.forfeit |= self.unsure;
            }
            self.unsure = false;
            self.last = self.inward.drain(..size).collect();
        }
    }

    /// The last complete reply.
    pub(crate) fn last_reply(&self) -> Vec<u8> {
        self.last.clone()
    }

    /// Records that the server may disconnect the client from now on: the client has shut down its
    /// end, or has sent descriptors whose close may block.
    pub(crate) fn forfeit(&mut self) {
        self.forfeit = true;
    }

    /// Records that the server has closed the connection.
    pub(crate) fn dropped(&self) {
        let may = self.forfeit || self.unsure || self.broken;
        assert!(may, "the server drops a client that kept to the protocol");
    }

    /// True if the client has followed the protocol so far, so that its replies are predictable.
    pub(crate) fn is_sound(&self) -> bool {
        !self.forfeit && !self.broken
    }

    pub(crate) fn is_answered(&self) -> bool {
        self.forfeit || self.broken || self.expected.is_empty()
    }

    pub(crate) fn check_answered(&self) {
        assert!(self.is_answered(), "no answer to {:?}", self.expected);
        assert!(self.inward.is_empty() || self.forfeit || self.broken, "half a reply");
    }
}
