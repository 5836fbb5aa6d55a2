//! Buffers for the data of requests, per client.
//!
//! The data of requests for whole blocks is in shared buffers: the disk and the socket (or
//! `/dev/fuse`) use the same buffer, so no copy is needed. Each client has its own limited number
//! of shared buffers, so that a slow client does not affect others. Other data is in ordinary
//! memory of the program: parts of blocks, long requests, requests beyond the limit, and all data
//! of a client with TLS, whose cryptography needs ordinary memory.

use crate::vectors::{Part, Room};
use shadowbell_block::{BlockQueue, Buffer, BufferPool};

/// Shared buffers of a client: size in bytes and number for each size. The buffers of a size are
/// allocated when one is first needed.
const SIZES: [(usize, usize); 3] = [(4 << 10, 128), (64 << 10, 32), (256 << 10, 8)];
/// Size in bytes of the largest ordinary buffer that is reused by later requests. `MAX_KEPT_BYTES`
/// limits the sum of all unused buffers.
const MAX_KEPT_BUFFER: usize = 256 << 10;
const MAX_KEPT_BYTES: usize = 4 << 20;

/// Data buffer of a request.
pub(crate) enum Data {
    Own(Vec<u8>),
    /// Buffer that the disk reads from and writes to.
    Shared(Buffer),
}

impl Default for Data {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Data {
    /// Copies the received bytes `from` to offset `at` of the buffer.
    pub(crate) fn put(&mut self, at: usize, from: &[u8]) {
        match self {
            Self::Own(bytes) => {
                if let Some(to) = bytes.get_mut(at..at + from.len()) {
                    to.copy_from_slice(from);
                }
            }
            Self::Shared(buffer) => {
                // The copy cannot fail, because the buffer is at least as long as the request.
                let _ = buffer.copy_from(at, from);
            }
        }
    }

    /// Returns the range `from..to` of the buffer for writing.
    pub(crate) fn room(&mut self, from: usize, to: usize) -> Room<'_> {
        match self {
            Self::Own(bytes) => Room::of(bytes.get_mut(from..to).unwrap_or_default()),
            Self::Shared(buffer) => match buffer.bytes() {
                Some(bytes) => Room::shared(bytes, from, to),
                None => Room::of(&mut []),
            },
        }
    }

    /// Returns the range `from..to` of the buffer for reading.
    pub(crate) fn part(&self, from: usize, to: usize) -> Part<'_> {
        match self {
            Self::Own(bytes) => Part::of(bytes.get(from..to).unwrap_or_default()),
            Self::Shared(buffer) => match buffer.bytes() {
                Some(bytes) => Part::shared(bytes, from, to),
                None => Part::NONE,
            },
        }
    }
}

/// State of the shared buffers of one size.
#[derive(Default)]
enum Pool {
    #[default]
    Unneeded,
    There(BufferPool),
    /// The allocation failed.
    None,
}

/// Memory of a client for the data of its requests.
pub(crate) struct DataMemory {
    pools: [Pool; SIZES.len()],
    /// Unused ordinary buffers, for later requests. `pooled` is their total capacity.
    spare: Vec<Vec<u8>>,
    pooled: usize,
}

impl DataMemory {
    pub(crate) fn new(requests: usize) -> Self {
        Self { pools: Default::default(), spare: Vec::with_capacity(requests), pooled: 0 }
    }

    /// Takes ordinary memory of at least `len` bytes.
    pub(crate) fn own(&mut self, len: usize) -> Data {
        let mut bytes = self.spare.pop().unwrap_or_default();
        self.pooled -= bytes.capacity();
        if bytes.len() < len {
            bytes.resize(len, 0);
        }
        Data::Own(bytes)
    }

    /// Takes a buffer of at least `len` bytes that the disk reads from and writes to, if one is
    /// available.
    pub(crate) fn shared(&mut self, disk: &BlockQueue, len: usize) -> Option<Data> {
        let mut sizes = SIZES.iter().zip(&mut self.pools);
        let (&(size, count), pool) = sizes.find(|((size, _), _)| *size >= len)?;
        if matches!(pool, Pool::Unneeded) {
            *pool = match disk.buffers(count, size) {
                Ok(buffers) => Pool::There(buffers),
                Err(error) => {
                    tracing::debug!("data is copied, for lack of buffers: {error}");
                    Pool::None
                }
            };
        }
        match pool {
            Pool::There(buffers) => buffers.take().map(Data::Shared),
            Pool::Unneeded | Pool::None => None,
        }
    }

    /// Takes a buffer back. Ordinary buffers are stored for later requests, up to `MAX_KEPT_BYTES`.
    pub(crate) fn give_back(&mut self, data: Data) {
        // The drop of a shared buffer returns it to its pool.
        let Data::Own(bytes) = data else { return };
        let room = bytes.capacity();
        if room > 0 && room <= MAX_KEPT_BUFFER && self.pooled + room <= MAX_KEPT_BYTES {
            self.pooled += room;
            self.spare.push(bytes);
        }
    }
}
