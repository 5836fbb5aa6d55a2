//! The data of requests, and the memory that a client has for them.
//!
//! Whole blocks lie in memory that the controller can reach: what is received or sent there is not
//! copied. This memory is the connection's own, so that a client that takes its time keeps no other
//! from anything; and there is only so much of it. Everything else (parts of blocks, long requests,
//! what is more than there is room for, and all data of a client with TLS, which does its
//! cryptography elsewhere) lies in memory of the program.

use crate::vectors::{Part, Room};
use shadowbell_block::BlockDevice;
use shadowbell_driver::{Buffer, BufferPool};

/// Buffers of one connection that the controller can reach: bytes of each, and how many. None is
/// there before it is needed.
const SIZES: [(usize, usize); 3] = [(4 << 10, 128), (64 << 10, 32), (256 << 10, 8)];
/// Other memory that is kept from one request to the next, per request and in all.
const KEEP: usize = 256 << 10;
const KEEP_ALL: usize = 4 << 20;

/// The data of a request, or room for them.
pub(crate) enum Data {
    Own(Vec<u8>),
    /// In memory that is shared with the controller.
    Shared(Buffer),
}

impl Default for Data {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Data {
    /// Puts what was received to its place.
    pub(crate) fn put(&mut self, at: usize, from: &[u8]) {
        match self {
            Self::Own(bytes) => {
                if let Some(to) = bytes.get_mut(at..at + from.len()) {
                    to.copy_from_slice(from);
                }
            }
            Self::Shared(buffer) => {
                // It is as long as the request, or longer.
                let _ = buffer.copy_from(at, from);
            }
        }
    }

    /// The room from `from` to `to`.
    pub(crate) fn room(&mut self, from: usize, to: usize) -> Room<'_> {
        match self {
            Self::Own(bytes) => Room::of(bytes.get_mut(from..to).unwrap_or_default()),
            Self::Shared(buffer) => Room::shared(buffer.bytes(), from, to),
        }
    }

    /// The bytes from `from` to `to`.
    pub(crate) fn part(&self, from: usize, to: usize) -> Part<'_> {
        match self {
            Self::Own(bytes) => Part::of(bytes.get(from..to).unwrap_or_default()),
            Self::Shared(buffer) => Part::shared(buffer.bytes(), from, to),
        }
    }
}

/// Buffers of one size.
#[derive(Default)]
enum Pool {
    #[default]
    Unneeded,
    There(BufferPool),
    /// There is no more memory that the controller can reach.
    None,
}

/// The memory that a client has for the data of its requests.
pub(crate) struct DataMemory {
    pools: [Pool; SIZES.len()],
    /// Other memory that is kept, and how much of it there is.
    spare: Vec<Vec<u8>>,
    kept: usize,
}

impl DataMemory {
    pub(crate) fn new(requests: usize) -> Self {
        Self { pools: Default::default(), spare: Vec::with_capacity(requests), kept: 0 }
    }

    /// Memory of the program, `len` bytes or more.
    pub(crate) fn own(&mut self, len: usize) -> Data {
        let mut bytes = self.spare.pop().unwrap_or_default();
        self.kept -= bytes.capacity();
        if bytes.len() < len {
            bytes.resize(len, 0);
        }
        Data::Own(bytes)
    }

    /// Memory that the controller can reach, `len` bytes or more, if there is any.
    pub(crate) fn shared(&mut self, disk: &BlockDevice, len: usize) -> Option<Data> {
        let mut sizes = SIZES.iter().zip(&mut self.pools);
        let (&(size, count), pool) = sizes.find(|((size, _), _)| *size >= len)?;
        if matches!(pool, Pool::Unneeded) {
            *pool = match disk.buffers(count, size) {
                Ok(buffers) => Pool::There(buffers),
                Err(error) => {
                    tracing::debug!(
                        "data are copied once more than they would have to be: {error}"
                    );
                    Pool::None
                }
            };
        }
        match pool {
            Pool::There(buffers) => buffers.take().map(Data::Shared),
            Pool::Unneeded | Pool::None => None,
        }
    }

    /// The data are not needed any more.
    pub(crate) fn give_back(&mut self, data: Data) {
        // A buffer goes back to its pool by itself.
        let Data::Own(bytes) = data else { return };
        let room = bytes.capacity();
        if room > 0 && room <= KEEP && self.kept + room <= KEEP_ALL {
            self.kept += room;
            self.spare.push(bytes);
        }
    }
}
