//! NBD wire format: constants, and the frames of both sides.
//!
//! Follows the protocol specification, `doc/proto.md` of the NBD project. All integers are
//! big-endian.

/// Registered TCP port of NBD.
pub const PORT: u16 = 10809;
/// Longest string of the protocol, such as an export name, in bytes (section "Values").
pub const MAX_STRING: usize = 4096;
/// Largest payload of a request in bytes that clients may use without negotiation.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// Magic number at the start of the server's greeting: `NBDMAGIC`.
pub const MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Magic number `IHAVEOPT`. It is the second word of a newstyle server's greeting, and the start of
/// an option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Magic number of a reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Magic number of a request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Magic number of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Magic number of a chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags of server and client.
pub mod handshake {
    /// Fixed newstyle: the client may send several options, and each gets a reply.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// No zero padding after the reply to [`option::EXPORT_NAME`](super::option::EXPORT_NAME).
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options of the handshake.
pub mod option {
    /// Selects an export and starts the transmission. The server cannot reply with an error.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the session.
    pub const ABORT: u32 = 2;
    /// Lists the names of the exports.
    pub const LIST: u32 = 3;
    /// Switches the connection to TLS.
    pub const STARTTLS: u32 = 5;
    /// Queries an export.
    pub const INFO: u32 = 6;
    /// Queries an export and starts the transmission.
    pub const GO: u32 = 7;
    /// Negotiates structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Lists the metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Selects metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Replies to options.
pub mod answer {
    /// Success; the last reply to the option.
    pub const ACK: u32 = 1;
    /// Reply with the name of an export.
    pub const SERVER: u32 = 2;
    /// Reply with information about an export: see [`info`](super::info).
    pub const INFO: u32 = 3;
    /// Reply with a metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Bit that is set in all error replies.
    pub const ERROR: u32 = 1 << 31;
    /// The server does not support the option.
    pub const ERR_UNSUP: u32 = ERROR | 1;
    /// The server's policy forbids the option.
    pub const ERR_POLICY: u32 = ERROR | 2;
    /// The option is malformed, or not allowed in this state.
    pub const ERR_INVALID: u32 = ERROR | 3;
    /// The server requires TLS.
    pub const ERR_TLS_REQD: u32 = ERROR | 5;
    /// The export does not exist.
    pub const ERR_UNKNOWN: u32 = ERROR | 6;
    /// The server is shutting down.
    pub const ERR_SHUTDOWN: u32 = ERROR | 7;
    /// The client has to negotiate the block size constraints of the export.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR | 8;
    /// The option is too long.
    pub const ERR_TOO_BIG: u32 = ERROR | 9;
}

/// Information types of an export.
pub mod info {
    /// Size and transmission flags of the export.
    pub const EXPORT: u16 = 0;
    /// Canonical name of the export.
    pub const NAME: u16 = 1;
    /// Description of the export, as a line of text.
    pub const DESCRIPTION: u16 = 2;
    /// Minimum, preferred and maximum block size of the export.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: capabilities of an export.
pub mod transmission {
    /// The flags are valid.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// The export is read-only.
    pub const READ_ONLY: u16 = 1 << 1;
    /// [`command::FLUSH`](super::command::FLUSH) is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// [`flag::FUA`](super::flag::FUA) is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// [`command::TRIM`](super::command::TRIM) is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// [`command::WRITE_ZEROES`](super::command::WRITE_ZEROES) is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// [`flag::DF`](super::flag::DF) is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers the completed writes of all connections.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// [`command::CACHE`](super::command::CACHE) is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// [`flag::FAST_ZERO`](super::flag::FAST_ZERO) is supported.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Request types.
pub mod command {
    /// Reads data.
    pub const READ: u16 = 0;
    /// Writes the data that follows the request.
    pub const WRITE: u16 = 1;
    /// Disconnects after the requests in flight.
    pub const DISC: u16 = 2;
    /// Makes all completed writes durable.
    pub const FLUSH: u16 = 3;
    /// Deallocates the range.
    pub const TRIM: u16 = 4;
    /// Hint that the range will be read soon.
    pub const CACHE: u16 = 5;
    /// Writes zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Queries the extents of the range in the selected metadata contexts.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Request flags.
pub mod flag {
    /// Forced unit access: the data is durable before the reply.
    pub const FUA: u16 = 1 << 0;
    /// Zeroes stay allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// Do not fragment: the reply to a read must have all data in one chunk.
    pub const DF: u16 = 1 << 2;
    /// One extent per metadata context is sufficient.
    pub const REQ_ONE: u16 = 1 << 3;
    /// The request must fail if zeroing is not faster than writing zeroes as data.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Extent flags of the metadata context `base:allocation`.
pub mod allocation {
    /// The extent is not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// The extent reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// Flags and types of structured reply chunks.
pub mod chunk {
    /// Flag of the last chunk of a reply.
    pub const FLAG_DONE: u16 = 1 << 0;
    /// Chunk without payload, which only ends the reply.
    pub const NONE: u16 = 0;
    /// Chunk with an offset and the data of a read.
    pub const OFFSET_DATA: u16 = 1;
    /// Chunk with the offset and length of a hole. A hole reads as zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Chunk with a metadata context and its extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// Bit that is set in the types of all error chunks.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// Chunk with an error number and a message.
    pub const ERROR: u16 = ERROR_BIT | 1;
    /// Chunk with an error number, a message, and the offset of the error.
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Error numbers of the protocol, independent of the system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum NbdError {
    /// Operation not permitted: the export is read-only.
    Perm = 1,
    /// I/O error.
    Io = 5,
    /// Out of memory.
    NoMem = 12,
    /// Invalid request.
    Inval = 22,
    /// No space: a write beyond the end of the export, or a full disk.
    NoSpc = 28,
    /// The reply would be too long.
    Overflow = 75,
    /// Operation not supported, or not possible in a fast way.
    NotSup = 95,
    /// The server is shutting down.
    Shutdown = 108,
}

/// Metadata context of the allocation status.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Parser that takes big-endian integers and bytes from the front. It returns `None` if too few
/// bytes are left.
#[derive(Clone, Copy, Debug)]
pub struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    /// Next `len` bytes.
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

    /// Next 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// Next 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// Next 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// Next string: a length in 32 bits, and that many bytes.
    pub fn string(&mut self) -> Option<&'a str> {
        let len = usize::try_from(self.u32()?).ok().filter(|len| *len <= MAX_STRING)?;
        std::str::from_utf8(self.bytes(len)?).ok()
    }
}

/// Request header. The data of a write follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Request flags, see [`flag`].
    pub flags: u16,
    /// Request type, one of [`command`].
    pub command: u16,
    /// Cookie, which the reply returns.
    pub cookie: u64,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

impl Request {
    /// Size of the header in bytes.
    pub const SIZE: usize = 28;

    /// Decodes a request. `None` if the magic number is wrong.
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

    /// Encodes the request.
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

    /// Length of the data that follows the header, in bytes.
    #[must_use]
    pub fn payload(&self) -> u32 {
        if self.command == command::WRITE { self.len } else { 0 }
    }
}

/// Appends an option of a client.
pub fn put_option(out: &mut Vec<u8>, option: u32, data: &[u8]) {
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// Appends a server's reply to an option.
pub fn put_answer(out: &mut Vec<u8>, option: u32, answer: u32, data: &[u8]) {
    out.extend(OPTION_REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(answer.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// Appends a string after its length.
pub fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_be_bytes());
    out.extend(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_decoded_as_encoded() {
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
