//! Encoding and decoding of simple and structured replies.

use crate::wire::{CHUNK_MAGIC, NbdError, Reader, SIMPLE_REPLY_MAGIC, chunk};

/// Longest error message that is sent, in bytes.
const MAX_TEXT: usize = 80;
/// Length in bytes of the longest reply header: the header of an error with a message.
const MAX_HEAD: usize = Chunk::SIZE + 6 + MAX_TEXT;

/// Header of a reply: all bytes before its data.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    bytes: [u8; MAX_HEAD],
    len: usize,
}

impl Head {
    fn new() -> Self {
        Self { bytes: [0; MAX_HEAD], len: 0 }
    }

    /// Appends `bytes`. All replies of this module fit into `MAX_HEAD`.
    fn put(mut self, bytes: &[u8]) -> Self {
        if let Some(room) = self.bytes.get_mut(self.len..self.len + bytes.len()) {
            room.copy_from_slice(bytes);
            self.len += bytes.len();
        }
        self
    }

    fn chunk(cookie: u64, flags: u16, kind: u16, len: u32) -> Self {
        Self::new()
            .put(&CHUNK_MAGIC.to_be_bytes())
            .put(&flags.to_be_bytes())
            .put(&kind.to_be_bytes())
            .put(&cookie.to_be_bytes())
            .put(&len.to_be_bytes())
    }

    /// Encoded bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// Simple reply. After a successful reply to a read, the data follows.
    #[must_use]
    pub fn simple(cookie: u64, outcome: Result<(), NbdError>) -> Self {
        Self::new()
            .put(&SIMPLE_REPLY_MAGIC.to_be_bytes())
            .put(&outcome.err().map_or(0, |error| error as u32).to_be_bytes())
            .put(&cookie.to_be_bytes())
    }

    /// Structured reply of one chunk without data.
    #[must_use]
    pub fn done(cookie: u64) -> Self {
        Self::chunk(cookie, chunk::FLAG_DONE, chunk::NONE, 0)
    }

    /// Empty header. The data that is sent with it continues the data of the previous reply.
    #[must_use]
    pub fn none() -> Self {
        Self::new()
    }

    /// Chunk header of a structured reply. `len` bytes of data follow. `is_last` marks the last
    /// chunk of the reply.
    #[must_use]
    pub fn data(cookie: u64, offset: u64, len: u32, is_last: bool) -> Self {
        let flags = if is_last { chunk::FLAG_DONE } else { 0 };
        Self::chunk(cookie, flags, chunk::OFFSET_DATA, len.saturating_add(8))
            .put(&offset.to_be_bytes())
    }

    /// Structured reply of one chunk with an error and a message.
    #[must_use]
    pub fn error(cookie: u64, error: NbdError, text: &str) -> Self {
        let mut end = text.len().min(MAX_TEXT);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let text = text.get(..end).unwrap_or_default();
        Self::chunk(cookie, chunk::FLAG_DONE, chunk::ERROR, 6 + text.len() as u32)
            .put(&(error as u32).to_be_bytes())
            .put(&(text.len() as u16).to_be_bytes())
            .put(text.as_bytes())
    }

    /// Structured block status reply of one chunk. The `count` extents of the metadata context
    /// `context` follow. Each extent is a length and flags, of 32 bits each.
    #[must_use]
    pub fn extents(cookie: u64, context: u32, count: u32) -> Self {
        let len = count.saturating_mul(8).saturating_add(4);
        Self::chunk(cookie, chunk::FLAG_DONE, chunk::BLOCK_STATUS, len).put(&context.to_be_bytes())
    }
}

/// Start of a received reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Incoming {
    /// Simple reply. After a successful reply to a read, the data follows.
    Simple {
        /// Cookie of the request.
        cookie: u64,
        /// Error number, 0 for success.
        error: u32,
    },
    /// Chunk of a structured reply, followed by its payload.
    Chunk(Chunk),
}

/// Header of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Flags: [`chunk::FLAG_DONE`] or 0.
    pub flags: u16,
    /// Chunk type, one of [`chunk`].
    pub kind: u16,
    /// Cookie of the request.
    pub cookie: u64,
    /// Length of the payload in bytes.
    pub len: u32,
}

impl Chunk {
    /// Size of the header in bytes.
    pub const SIZE: usize = 20;
}

/// Error for a reply with an unknown magic number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid reply: unknown magic number {magic:#010x}")]
pub struct BadReply {
    /// Received magic number.
    pub magic: u32,
}

impl Incoming {
    /// Decodes the header of a reply at the start of `bytes`. Returns the header and its length, or
    /// `None` if the header is incomplete.
    ///
    /// # Errors
    ///
    /// [`BadReply`]. The rest of the stream cannot be decoded.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, BadReply> {
        let mut reader = Reader(bytes);
        let mut read = || {
            Some(match reader.u32()? {
                SIMPLE_REPLY_MAGIC => {
                    let (error, cookie) = (reader.u32()?, reader.u64()?);
                    Ok(Self::Simple { cookie, error })
                }
                CHUNK_MAGIC => {
                    let (flags, kind) = (reader.u16()?, reader.u16()?);
                    let (cookie, len) = (reader.u64()?, reader.u32()?);
                    Ok(Self::Chunk(Chunk { flags, kind, cookie, len }))
                }
                magic => Err(BadReply { magic }),
            })
        };
        let Some(outcome) = read().transpose()? else { return Ok(None) };
        Ok(Some((outcome, bytes.len() - reader.0.len())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(head: &Head) -> (Incoming, usize) {
        for short in 0..head.bytes().len().min(16) {
            assert_eq!(Incoming::decode(&head.bytes()[..short]), Ok(None));
        }
        Incoming::decode(head.bytes()).unwrap().unwrap()
    }

    #[test]
    fn replies_are_decoded_as_encoded() {
        let simple = Head::simple(7, Err(NbdError::Io));
        assert_eq!(decode(&simple), (Incoming::Simple { cookie: 7, error: 5 }, 16));
        let chunk =
            |kind, len| Incoming::Chunk(Chunk { flags: chunk::FLAG_DONE, kind, cookie: 9, len });
        assert_eq!(decode(&Head::done(9)), (chunk(chunk::NONE, 0), 20));
        assert_eq!(decode(&Head::data(9, 3, 100, true)), (chunk(chunk::OFFSET_DATA, 108), 20));
        assert_eq!(decode(&Head::extents(9, 1, 2)), (chunk(chunk::BLOCK_STATUS, 20), 20));
        let error = Head::error(9, NbdError::Inval, "what");
        assert_eq!(decode(&error), (chunk(chunk::ERROR, 10), 20));
        assert_eq!(&error.bytes()[20..], b"\0\0\0\x16\0\x04what");
        assert_eq!(Incoming::decode(&[1; 20]), Err(BadReply { magic: 0x0101_0101 }));
    }

    #[test]
    fn a_long_text_is_truncated_at_a_character_boundary() {
        let head = Head::error(9, NbdError::Io, &"ü".repeat(100));
        let Ok(Some((Incoming::Chunk(chunk), at))) = Incoming::decode(head.bytes()) else {
            panic!("no chunk");
        };
        assert_eq!(chunk.len as usize, head.bytes().len() - at);
        assert!(std::str::from_utf8(&head.bytes()[at + 6..]).is_ok());
        let head = Head::error(9, NbdError::Io, &format!("x{}", "ü".repeat(100)));
        assert!(std::str::from_utf8(&head.bytes()[26..]).is_ok());
    }
}
