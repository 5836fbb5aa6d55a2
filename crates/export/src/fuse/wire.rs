//! FUSE requests and answers, in the kernel's layout and native byte order.

use rustix::io::Errno;

/// Opcodes of requests.
pub(super) mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const FLUSH: u32 = 25;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const LSEEK: u32 = 46;
    pub(crate) const COPY_FILE_RANGE: u32 = 47;
}

/// Flags of an open file.
pub(super) mod open {
    /// The kernel does not cache the file's data.
    pub(crate) const DIRECT_IO: u32 = 1 << 0;
    /// Several writes to the file may be in flight.
    pub(crate) const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// FUSE protocol version. Version 7.40 has all features that are used.
const VERSION: (u32, u32) = (7, 40);

/// Flags of the negotiation (`INIT`). Flags from bit 32 on are in a second field, which exists if
/// both ends have `INIT_EXT`.
mod init {
    pub(super) const ASYNC_READ: u64 = 1 << 0;
    pub(super) const BIG_WRITES: u64 = 1 << 5;
    pub(super) const ASYNC_DIO: u64 = 1 << 15;
    pub(super) const MAX_PAGES: u64 = 1 << 22;
    pub(super) const INIT_EXT: u64 = 1 << 30;
    pub(super) const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
    pub(super) const HAS_RESEND: u64 = 1 << 39;
    pub(super) const WANTED: u64 =
        ASYNC_READ | BIG_WRITES | ASYNC_DIO | MAX_PAGES | DIRECT_IO_ALLOW_MMAP | HAS_RESEND;
}

/// Largest number of asynchronous requests that the kernel has in flight, and the number at which
/// the file counts as congested.
const BACKGROUND: (u16, u16) = (256, 192);

/// Code of the notification that makes the kernel send unanswered requests again.
const NOTIFY_RESEND: i32 = 7;

/// Attributes that a `SETATTR` changes.
pub(super) mod change {
    pub(crate) const MODE: u32 = 1 << 0;
    pub(crate) const UID: u32 = 1 << 1;
    pub(crate) const GID: u32 = 1 << 2;
    pub(crate) const SIZE: u32 = 1 << 3;
}

/// Largest data length of a request in bytes: 256 pages, the limit of the kernel.
pub(super) const MAX_REQUEST: u32 = 1 << 20;
/// Size of a request header in bytes.
const HEADER: usize = 40;
/// Size of a `WRITE` without its data, in bytes. No other request with data has longer fields.
pub(super) const WRITE_HEAD: usize = HEADER + 40;
/// Size of an answer header, in bytes.
const REPLY: usize = 16;
/// Length in bytes of the longest answer without data: the answer with attributes.
const LONGEST: usize = REPLY + 16 + ATTRIBUTES;
const ATTRIBUTES: usize = 88;

/// Parser of consecutive integers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    pub(super) fn u32(&mut self) -> Option<u32> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*first))
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*first))
    }
}

/// Decoded request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request<'a> {
    pub(super) opcode: u32,
    /// Number of the request. The answer contains the same number.
    pub(super) unique: u64,
    /// Fields that depend on the opcode.
    pub(super) fields: Fields<'a>,
}

impl<'a> Request<'a> {
    /// Decodes the request at the start of `bytes`. The data of a write may be in another buffer.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let mut head = Fields(bytes);
        let (_len, opcode, unique) = (head.u32()?, head.u32()?, head.u64()?);
        Some(Self { opcode, unique, fields: Fields(bytes.get(HEADER..)?) })
    }
}

/// Range of a `READ` or `WRITE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) offset: u64,
    pub(super) len: u32,
}

impl Extent {
    pub(super) fn decode(mut fields: Fields<'_>) -> Option<Self> {
        let _handle = fields.u64()?;
        Some(Self { offset: fields.u64()?, len: fields.u32()? })
    }
}

/// Attributes of a file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes {
    pub(super) size: u64,
    /// Access, modification and change time: seconds and nanoseconds since 1970.
    pub(super) time: (u64, u32),
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) block_size: u32,
}

/// Inode number of the file. The file is the root of its file system.
const INODE: u64 = 1;

impl Attributes {
    fn put(&self, reply: &mut Reply) {
        reply.u64(INODE).u64(self.size).u64(self.size / 512);
        let (seconds, nanoseconds) = self.time;
        (0..3).for_each(|_| _ = reply.u64(seconds));
        (0..3).for_each(|_| _ = reply.u32(nanoseconds));
        let (links, device, flags) = (1, 0, 0);
        reply.u32(self.mode).u32(links).u32(self.uid).u32(self.gid);
        reply.u32(device).u32(self.block_size).u32(flags);
    }
}

/// Answer without the data of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    bytes: [u8; LONGEST],
    len: usize,
}

impl Reply {
    fn new(unique: u64, error: i32) -> Self {
        let mut reply = Self { bytes: [0; LONGEST], len: 0 };
        reply.u32(REPLY as u32).u32(error.cast_unsigned()).u64(unique);
        reply
    }

    /// Creates an answer that reports success.
    pub(super) fn done(unique: u64) -> Self {
        Self::new(unique, 0)
    }

    /// Creates an answer that reports an error.
    pub(super) fn error(unique: u64, errno: Errno) -> Self {
        Self::new(unique, -errno.raw_os_error())
    }

    /// Creates a notification, which has no request: the kernel sends unanswered requests again.
    pub(super) fn resend() -> Self {
        Self::new(0, NOTIFY_RESEND)
    }

    /// Creates the answer to the negotiation request that has these `fields`.
    pub(super) fn init(unique: u64, mut fields: Fields<'_>) -> Self {
        let mut next = || fields.u32().unwrap_or_default();
        let (major, minor, read_ahead, mut offered) = (next(), next(), next(), u64::from(next()));
        // Kernels before Linux 3.15 have shorter answers.
        if major < VERSION.0 || (major == VERSION.0 && minor < 23) {
            return Self::error(unique, Errno::PROTO);
        }
        if offered & init::INIT_EXT != 0 {
            offered |= u64::from(next()) << 32;
        }
        let accepted = offered & (init::WANTED | init::INIT_EXT);
        let (background, congestion) = BACKGROUND;
        let nanoseconds = 1;
        let pages = MAX_REQUEST as usize / rustix::param::page_size();
        let mut reply = Self::done(unique);
        reply.u32(VERSION.0).u32(VERSION.1.min(minor)).u32(read_ahead).u32(accepted as u32);
        reply.put(&background.to_ne_bytes()).put(&congestion.to_ne_bytes());
        reply.u32(MAX_REQUEST).u32(nanoseconds);
        reply.put(&(pages as u16).to_ne_bytes()).put(&0_u16.to_ne_bytes());
        reply.u32((accepted >> 32) as u32);
        (0..7).for_each(|_| _ = reply.u32(0));
        reply
    }

    /// Creates an answer that reports a write of `len` bytes.
    pub(super) fn written(unique: u64, len: u32) -> Self {
        let mut reply = Self::done(unique);
        reply.u32(len).u32(0);
        reply
    }

    /// Creates an answer with the result of a seek.
    pub(super) fn offset(unique: u64, offset: u64) -> Self {
        let mut reply = Self::done(unique);
        reply.u64(offset);
        reply
    }

    /// Creates an answer that reports a successful open.
    pub(super) fn opened(unique: u64, flags: u32) -> Self {
        let mut reply = Self::done(unique);
        reply.u64(0).u32(flags).u32(0);
        reply
    }

    /// Creates an answer with attributes, which the kernel may cache for `remember` seconds.
    pub(super) fn attributes(unique: u64, attributes: &Attributes, remember: u64) -> Self {
        let mut reply = Self::done(unique);
        reply.u64(remember).u32(0).u32(0);
        attributes.put(&mut reply);
        reply
    }

    /// Creates an answer with the statistics of a file system of `blocks` blocks, all of which
    /// belong to the file.
    pub(super) fn file_system(unique: u64, blocks: u64, block_size: u32) -> Self {
        let mut reply = Self::done(unique);
        let (free, available, files, files_free, name) = (0, 0, 1, 0, 0);
        reply.u64(blocks).u64(free).u64(available).u64(files).u64(files_free);
        reply.u32(block_size).u32(name).u32(block_size).u32(0);
        (0..6).for_each(|_| _ = reply.u32(0));
        reply
    }

    /// Records that `len` bytes of data follow the answer.
    pub(super) fn with_data(mut self, len: usize) -> Self {
        self.set_len(self.len + len);
        self
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.put(&value.to_ne_bytes())
    }

    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        if let Some(to) = self.bytes.get_mut(self.len..self.len + bytes.len()) {
            to.copy_from_slice(bytes);
            self.len += bytes.len();
            self.set_len(self.len);
        }
        self
    }

    /// Stores the total length, data included, in the header.
    fn set_len(&mut self, len: usize) {
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        if let Some(to) = self.bytes.first_chunk_mut() {
            *to = len.to_ne_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u32_at(bytes: &[u8], at: usize) -> u32 {
        u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap())
    }

    #[test]
    fn answers_begin_with_their_length_and_number() {
        let reply = Reply::error(7, Errno::IO);
        assert_eq!(reply.bytes().len(), 16);
        assert_eq!(u32_at(reply.bytes(), 0), 16);
        assert_eq!(u32_at(reply.bytes(), 4).cast_signed(), -5);
        assert_eq!(u32_at(reply.bytes(), 8), 7);
        let read = Reply::done(9).with_data(4096);
        assert_eq!((read.bytes().len(), u32_at(read.bytes(), 0)), (16, 16 + 4096));
    }

    #[test]
    fn fuse_replies_have_the_kernels_length() {
        let attributes =
            Attributes { size: 1 << 20, time: (1, 2), mode: 3, uid: 4, gid: 5, block_size: 4096 };
        let about = Reply::attributes(1, &attributes, 3600);
        let bytes = about.bytes();
        assert_eq!((bytes.len(), u32_at(bytes, 0)), (16 + 104, 16 + 104));
        // The values are inode, size and number of blocks.
        assert_eq!((u32_at(bytes, 32), u32_at(bytes, 40), u32_at(bytes, 48)), (1, 1 << 20, 2048));
        // The values are mode, number of links, owner and group.
        let found: Vec<u32> = (0..4).map(|i| u32_at(bytes, 92 + 4 * i)).collect();
        assert_eq!(found, [3, 1, 4, 5]);
        assert_eq!(Reply::written(1, 5).bytes().len(), 16 + 8);
        assert_eq!(Reply::offset(1, 5).bytes().len(), 16 + 8);
        assert_eq!(Reply::opened(1, 5).bytes().len(), 16 + 16);
        assert_eq!(Reply::file_system(1, 5, 512).bytes().len(), 16 + 80);
    }

    #[test]
    fn the_negotiation_accepts_what_both_have() {
        let init = |words: [u32; 5]| {
            let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_ne_bytes).collect();
            Reply::init(3, Fields(&bytes))
        };
        let reply = init([7, 45, 131_072, u32::MAX, u32::MAX]);
        let bytes = reply.bytes();
        assert_eq!((bytes.len(), u32_at(bytes, 0), u32_at(bytes, 4)), (16 + 64, 16 + 64, 0));
        assert_eq!((u32_at(bytes, 16), u32_at(bytes, 20), u32_at(bytes, 24)), (7, 40, 131_072));
        assert_eq!(u64::from(u32_at(bytes, 28)), init::INIT_EXT | init::WANTED & 0xffff_ffff);
        assert_eq!(u64::from(u32_at(bytes, 48)), init::WANTED >> 32);
        assert_eq!(u32_at(bytes, 36), MAX_REQUEST);
        // A kernel with protocol 7.31 knows neither `flags2` nor the newer bits of `flags`, so the
        // reply has none of them.
        let reply = init([7, 31, 0, 1 << 5, u32::MAX]);
        let bytes = reply.bytes();
        assert_eq!((u32_at(bytes, 20), u32_at(bytes, 28), u32_at(bytes, 48)), (31, 1 << 5, 0));
        let refused = init([7, 22, 0, 0, 0]);
        assert_eq!((refused.bytes().len(), refused), (16, Reply::error(3, Errno::PROTO)));
        assert_eq!(Reply::resend().bytes().len(), 16);
    }

    #[test]
    fn a_request_that_is_cut_off_is_none() {
        let mut bytes = vec![0; 39];
        assert!(Request::decode(&bytes).is_none());
        bytes.push(0);
        let request = Request::decode(&bytes).unwrap();
        assert!(Extent::decode(request.fields).is_none());
        bytes.extend([0; 20]);
        let request = Request::decode(&bytes).unwrap();
        assert_eq!(Extent::decode(request.fields), Some(Extent { offset: 0, len: 0 }));
    }
}
