//! In-flight tracking memory of all queues of a device.

use super::super::request::QUEUE_SIZE;
use super::layout::queue_bytes;
use parking_lot::RwLock;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use shadowbell_memory::{MapError, Mapping, Protection, SharedBytes};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Length in bytes of a payload: two words of eight bytes and two of two bytes. With the padding of
/// a C compiler, it is `PADDED`.
const PAYLOAD: usize = 20;
const PADDED: usize = 24;

/// Geometry of the memory, from the payload of the messages about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Length in bytes, from `offset`.
    pub(crate) len: u64,
    pub(crate) offset: u64,
    pub(crate) queues: u16,
    /// Largest number of descriptors per queue.
    pub(crate) entries: u16,
}

impl Shape {
    /// Decodes the payload of a message, for a device with `queues` queues.
    pub(crate) fn parse(payload: &[u8], queues: usize) -> Result<Self, ShapeError> {
        let bad = ShapeError::Length(payload.len());
        let (Some(&[len, offset]), Some(&[q0, q1, e0, e1])) = (
            payload.as_chunks().0.get(..2).and_then(<[_]>::as_array),
            payload.get(16..PAYLOAD).and_then(<[u8]>::as_array),
        ) else {
            return Err(bad);
        };
        if payload.len() != PAYLOAD && payload.len() != PADDED {
            return Err(bad);
        }
        let [len, offset] = [len, offset].map(u64::from_ne_bytes);
        let [of_queues, entries] = [[q0, q1], [e0, e1]].map(u16::from_ne_bytes);
        let possible =
            (1..=queues).contains(&of_queues.into()) && (1..=QUEUE_SIZE).contains(&entries.into());
        if !possible {
            return Err(ShapeError::Queues { queues: of_queues, entries, have: queues });
        }
        Ok(Self { len, offset, queues: of_queues, entries })
    }

    /// Checks that the memory is large enough.
    pub(crate) fn check_length(&self) -> Result<(), ShapeError> {
        let (len, needed) = (self.len, self.needed());
        if needed > len { Err(ShapeError::TooShort { len, needed }) } else { Ok(()) }
    }

    /// Number of bytes that the queues need.
    pub(crate) fn needed(&self) -> u64 {
        usize::from(self.queues) as u64 * queue_bytes(self.entries) as u64
    }
}

/// Invalid geometry.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ShapeError {
    #[error("a message about requests in flight has {0} bytes")]
    Length(usize),
    #[error(
        "requests in flight of {queues} queues of {entries} entries cannot be tracked: there are \
         {have} queues of up to {QUEUE_SIZE} entries"
    )]
    Queues { queues: u16, entries: u16, have: usize },
    #[error("memory of {len} bytes is too short to track requests in flight: {needed} are needed")]
    TooShort { len: u64, needed: u64 },
}

/// Mapped tracking memory.
pub(crate) struct Region {
    bytes: SharedBytes,
    shape: Shape,
}

impl Region {
    /// Creates a zeroed file for tracking memory. The file is sealed against truncation.
    pub(crate) fn make(shape: &Shape) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("vhost-inflight", flags)?;
        ftruncate(&file, shape.len)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    }

    /// Maps the file of a frontend.
    pub(crate) fn map(file: impl AsFd, shape: Shape) -> Result<Self, MapError> {
        let mapping = Mapping::from_fd(file, shape.offset, shape.needed(), Protection::ReadWrite)?;
        Ok(Self { bytes: mapping.bytes(), shape })
    }

    /// Largest number of descriptors per queue.
    pub(crate) fn entries(&self) -> u16 {
        self.shape.entries
    }

    /// Tracking memory of queue `index`.
    pub(crate) fn queue(&self, index: usize) -> Option<SharedBytes> {
        let len = queue_bytes(self.shape.entries);
        let has_it = index < usize::from(self.shape.queues);
        has_it.then(|| self.bytes.slice(index * len, len)).flatten()
    }

    /// True if a part of the memory was lost, because its file was truncated, or no huge pages were
    /// left.
    pub(crate) fn is_poisoned(&self) -> bool {
        self.bytes.mapping().is_poisoned()
    }
}

/// Tracking memory that the frontend shared last. A queue that starts takes this memory, and uses
/// it until the queue stops.
#[derive(Default)]
pub(crate) struct Kept(RwLock<Option<Arc<Region>>>);

impl Kept {
    pub(crate) fn set(&self, region: Region) {
        *self.0.write() = Some(Arc::new(region));
    }

    pub(crate) fn get(&self) -> Option<Arc<Region>> {
        self.0.read().clone()
    }
}
