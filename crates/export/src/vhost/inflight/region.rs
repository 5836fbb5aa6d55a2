//! In-flight tracking memory of all queues of a device.

use super::layout::queue_bytes;
use parking_lot::RwLock;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use shadowbell_memory::{MapError, Mapping, Protection, SharedBytes};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// Geometry of the memory, from the payload of the messages about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Shape {
    /// Length in bytes, from `offset`.
    pub(in super::super) len: u64,
    pub(in super::super) offset: u64,
    pub(in super::super) queues: u16,
    /// Largest number of descriptors per queue.
    pub(in super::super) entries: u16,
}

impl Shape {
    /// Number of bytes that the queues need.
    pub(in super::super) fn needed(&self) -> u64 {
        usize::from(self.queues) as u64 * queue_bytes(self.entries) as u64
    }
}

/// Mapped tracking memory.
pub(in super::super) struct Region {
    bytes: SharedBytes,
    shape: Shape,
}

impl Region {
    /// Creates a zeroed file for tracking memory. The file is sealed against truncation.
    pub(in super::super) fn make(shape: &Shape) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("vhost-inflight", flags)?;
        ftruncate(&file, shape.len)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    }

    /// Maps the file of a frontend.
    pub(in super::super) fn map(file: impl AsFd, shape: Shape) -> Result<Self, MapError> {
        let mapping = Mapping::from_fd(file, shape.offset, shape.needed(), Protection::ReadWrite)?;
        Ok(Self { bytes: mapping.bytes(), shape })
    }

    /// Largest number of descriptors per queue.
    pub(in super::super) fn entries(&self) -> u16 {
        self.shape.entries
    }

    /// Part of queue `index`.
    pub(in super::super) fn queue(&self, index: usize) -> Option<SharedBytes> {
        let len = queue_bytes(self.shape.entries);
        let has_it = index < usize::from(self.shape.queues);
        has_it.then(|| self.bytes.slice(index * len, len)).flatten()
    }

    /// True if a part of the memory was lost, because its file was truncated, or no huge pages were
    /// left.
    pub(in super::super) fn is_poisoned(&self) -> bool {
        self.bytes.mapping().is_poisoned()
    }
}

/// Tracking memory that the frontend shared last. A queue uses the memory from its start to its
/// stop.
#[derive(Default)]
pub(in super::super) struct Kept(RwLock<Option<Arc<Region>>>);

impl Kept {
    pub(in super::super) fn set(&self, region: Region) {
        *self.0.write() = Some(Arc::new(region));
    }

    pub(in super::super) fn get(&self) -> Option<Arc<Region>> {
        self.0.read().clone()
    }
}
