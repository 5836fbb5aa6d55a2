//! NBD on the wire: the numbers, and the frames that both ends send. No sockets here.
//!
//! Everything follows the protocol's own document, `doc/proto.md` of the NBD project; all integers
//! are big-endian.

/// The TCP port that is registered for NBD.
pub const PORT: u16 = 10809;
/// The longest name of an export, or of anything else that is a string. Section "Values".
pub const MAX_STRING: usize = 4096;
/// The most bytes that a request carries or asks for: what clients may rely on without asking.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// What a server begins with: `NBDMAGIC`.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// What a newstyle server goes on with, and an option begins with: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// What the reply to an option begins with.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// What a request begins with.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// What a simple reply begins with.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// What a chunk of a structured reply begins with.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Flags of the handshake, of the server and of the client.
pub mod handshake {
    /// Options may follow each other, and each has a reply.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// No zeroes behind the answer to [`option::EXPORT_NAME`](super::option::EXPORT_NAME).
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options that a client may send.
pub mod option {
    /// Choose an export, and begin with the transmission. No reply if that is not possible.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// List the names of the exports.
    pub const LIST: u32 = 3;
    /// Go on with TLS.
    pub const STARTTLS: u32 = 5;
    /// Ask about an export.
    pub const INFO: u32 = 6;
    /// Ask about an export, and begin with the transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options.
pub mod answer {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// Something about an export: see [`info`](super::info).
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Set in all that are errors.
    pub const ERROR: u32 = 1 << 31;
    /// The server does not know the option.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// The server does not want to.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// The option makes no sense like that.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// TLS comes first.
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    /// There is no such export.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The server is about to end.
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    /// The client has to keep to sizes that it did not ask for.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR | 8;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// What can be asked about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The name that it should be called by.
    pub const NAME: u16 = 1;
    /// A line about it.
    pub const DESCRIPTION: u16 = 2;
    /// The least, the preferred and the largest size of a request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub mod transmission {
    /// The flags are valid.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// It takes no writes.
    pub const READ_ONLY: u16 = 1 << 1;
    /// There is [`command::FLUSH`](super::command::FLUSH).
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// There is [`flag::FUA`](super::flag::FUA).
    pub const SEND_FUA: u16 = 1 << 3;
    /// There is [`command::TRIM`](super::command::TRIM).
    pub const SEND_TRIM: u16 = 1 << 5;
    /// There is [`command::WRITE_ZEROES`](super::command::WRITE_ZEROES).
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// There is [`flag::DF`](super::flag::DF).
    pub const SEND_DF: u16 = 1 << 7;
    /// What one connection flushes is flushed for all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// There is [`command::CACHE`](super::command::CACHE).
    pub const SEND_CACHE: u16 = 1 << 10;
    /// There is [`flag::FAST_ZERO`](super::flag::FAST_ZERO).
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Requests.
pub mod command {
    /// Read.
    pub const READ: u16 = 0;
    /// Write: as many bytes as the request says follow it.
    pub const WRITE: u16 = 1;
    /// Finish what was asked for, and hang up.
    pub const DISC: u16 = 2;
    /// Make everything durable that was answered before.
    pub const FLUSH: u16 = 3;
    /// The bytes are not needed any more.
    pub const TRIM: u16 = 4;
    /// The bytes will be needed soon.
    pub const CACHE: u16 = 5;
    /// Make the bytes zero.
    pub const WRITE_ZEROES: u16 = 6;
    /// Ask about the bytes, by the metadata contexts that were chosen.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of requests.
pub mod flag {
    /// Durable when it is answered.
    pub const FUA: u16 = 1 << 0;
    /// Zeroes that stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Data in one piece.
    pub const DF: u16 = 1 << 2;
    /// One extent is enough.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeroes only if that is faster than writing them.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// What the flags of an extent say in the metadata context `base:allocation`.
pub mod allocation {
    /// It is not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// It reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// Chunks of structured replies.
pub mod chunk {
    /// The last chunk of its reply.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// Nothing but the end.
    pub const NONE: u16 = 0;
    /// An offset, and the data there.
    pub const OFFSET_DATA: u16 = 1;
    /// An offset, and the length of zeroes there.
    pub const OFFSET_HOLE: u16 = 2;
    /// A metadata context, and extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// Set in all that are errors.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// An error, and a line about it.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// An error, a line about it, and the offset that it is about.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Error numbers, the same on every system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum NbdError {
    /// Not permitted: the export takes no writes.
    Perm = 1,
    /// Input or output failed.
    Io = 5,
    /// There is no memory for it.
    NoMem = 12,
    /// The request makes no sense.
    Inval = 22,
    /// There is no such place to write to, or no room.
    NoSpc = 28,
    /// The answer would be too long.
    Overflow = 75,
    /// It can not be done, or not fast.
    NotSup = 95,
    /// The server is about to end.
    Shutdown = 108,
}

/// The metadata context that says what is allocated.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Takes big-endian integers and bytes off the front; `None` where there are not enough.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*head)
    }

    /// The next 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A length in 32 bits, and a string of that many bytes.
    pub fn string(&mut self) -> Option<&'a str> {
        let len = usize::try_from(self.u32()?).ok().filter(|len| *len <= MAX_STRING)?;
        std::str::from_utf8(self.bytes(len)?).ok()
    }
}

/// A request, as it is on the wire. A write has its data behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// [`flag`]s.
    pub flags: u16,
    /// One of [`command`].
    pub command: u16,
    /// Comes back with the reply.
    pub cookie: u64,
    /// The first byte.
    pub offset: u64,
    /// How many bytes.
    pub len: u32,
}

impl Request {
    /// Bytes of a request.
    pub const SIZE: usize = 28;

    /// The request in these bytes; `None` if they do not begin as one does.
    #[must_use]
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Option<Self> {
        let mut reader = Reader(bytes);
        if reader.u32()? != REQUEST_MAGIC {
            return None;
        }
        Some(Self {
            flags: reader.u16()?,
            command: reader.u16()?,
            cookie: reader.u64()?,
            offset: reader.u64()?,
            len: reader.u32()?,
        })
    }

    /// The bytes of the request.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(Self::SIZE);
        out.extend(REQUEST_MAGIC.to_be_bytes());
        out.extend(self.flags.to_be_bytes());
        out.extend(self.command.to_be_bytes());
        out.extend(self.cookie.to_be_bytes());
        out.extend(self.offset.to_be_bytes());
        out.extend(self.len.to_be_bytes());
        out
    }

    /// How many bytes of data follow the request.
    #[must_use]
    pub fn payload(&self) -> u32 {
        if self.command == command::WRITE { self.len } else { 0 }
    }
}

/// Appends an option, as a client sends it.
pub fn put_option(out: &mut Vec<u8>, option: u32, data: &[u8]) {
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// Appends the reply to an option, as a server sends it.
pub fn put_answer(out: &mut Vec<u8>, option: u32, answer: u32, data: &[u8]) {
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(answer.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// Appends a string with its length before it.
pub fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_be_bytes());
    out.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_reads_as_it_was_written() {
        let request = Request {
            flags: flag::FUA,
            command: command::WRITE,
            cookie: 0x1122_3344_5566_7788,
            offset: 0x99aa,
            len: 0xbbcc,
        };
        let bytes: [u8; Request::SIZE] = request.encode().try_into().unwrap();
        assert_eq!(&bytes[..8], b"\x25\x60\x95\x13\0\x01\0\x01");
        assert_eq!(Request::decode(&bytes), Some(request));
        assert_eq!(request.payload(), 0xbbcc);
        let mut other = bytes;
        other[0] ^= 1;
        assert_eq!(Request::decode(&other), None);
    }

    #[test]
    fn strings_that_are_none_are_seen() {
        let mut text = Vec::new();
        put_string(&mut text, "disk");
        assert_eq!(Reader(&text).string(), Some("disk"));
        assert_eq!(Reader(&text[..7]).string(), None);
        assert_eq!(Reader(b"\0\0\0\x01\xff").string(), None);
        let mut long = Vec::new();
        put_string(&mut long, &"x".repeat(MAX_STRING + 1));
        assert_eq!(Reader(&long).string(), None);
    }
}
