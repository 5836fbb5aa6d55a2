//! The memory of all queues of a device.

use super::layout::queue_bytes;
use parking_lot::RwLock;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use shadowbell_memory::{MapError, Mapping, Protection, SharedBytes};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

/// How the memory is shared: the payload of the messages about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in super::super) struct Shape {
    /// Bytes of it, from `offset` on.
    pub(in super::super) len: u64,
    pub(in super::super) offset: u64,
    pub(in super::super) queues: u16,
    /// Descriptors of each queue, at most.
    pub(in super::super) entries: u16,
}

impl Shape {
    /// The bytes that so many queues need.
    pub(in super::super) fn needed(&self) -> u64 {
        usize::from(self.queues) as u64 * queue_bytes(self.entries) as u64
    }
}

/// The memory.
pub(in super::super) struct Region {
    bytes: SharedBytes,
    shape: Shape,
}

impl Region {
    /// A file for such memory, which is all zeroes, and which nobody can cut off.
    pub(in super::super) fn make(shape: &Shape) -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("vhost-inflight", flags)?;
        ftruncate(&file, shape.len)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(file)
    }

    /// Maps what a frontend shares.
    pub(in super::super) fn map(file: impl AsFd, shape: Shape) -> Result<Self, MapError> {
        let mapping = Mapping::from_fd(file, shape.offset, shape.needed(), Protection::ReadWrite)?;
        Ok(Self { bytes: mapping.bytes(), shape })
    }

    /// Descriptors of each queue, at most.
    pub(in super::super) fn entries(&self) -> u16 {
        self.shape.entries
    }

    /// The part of a queue.
    pub(in super::super) fn queue(&self, index: usize) -> Option<SharedBytes> {
        let len = queue_bytes(self.shape.entries);
        let has_it = index < usize::from(self.shape.queues);
        has_it.then(|| self.bytes.slice(index * len, len)).flatten()
    }

    /// Whether part of it was lost: its file was truncated, or there are no pages for it.
    pub(in super::super) fn is_poisoned(&self) -> bool {
        self.bytes.mapping().is_poisoned()
    }
}

/// The memory that a frontend has shared last. A queue has it from its start to its stop.
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
