//! The guest's memory, mapped so that its owner can not take this process down with it.
//!
//! rust-vmm maps what the frontend sends, and touching a page whose file was truncated would raise
//! SIGBUS. So nothing here touches those mappings: each is replaced by one of our own, which reads as
//! zeroes then and says so ([`Mapping::is_poisoned`]). Between the two, somebody who looks at the
//! memory waits.

use super::sys;
use ::shadowbell_memory::{Mapping, Protection};
use std::io;
use std::sync::Arc;
use vhost_user_backend::bitmap::BitmapReplace;
use vm_memory::bitmap::{Bitmap, WithBitmapSlice};
use vm_memory::mmap::NewBitmap;
use vm_memory::{
    GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryLoadGuard,
    GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};

/// A guest's memory.
pub(super) type Memory = GuestMemoryMmap<Guarded>;
/// The same, as it is at the moment.
pub(super) type Current = GuestMemoryAtomic<Memory>;
/// As it was at one moment.
pub(super) type Snapshot = GuestMemoryLoadGuard<Memory>;

/// What rust-vmm keeps with a region for the sake of migration, which is not offered. It holds the
/// mapping of a region of ours.
#[derive(Clone, Debug, Default)]
pub(super) struct Guarded(Option<Arc<Mapping>>);

impl Guarded {
    pub(super) fn new(mapping: Arc<Mapping>) -> Self {
        Self(Some(mapping))
    }
}

impl WithBitmapSlice<'_> for Guarded {
    type S = ();
}

impl Bitmap for Guarded {
    fn mark_dirty(&self, _: usize, _: usize) {}

    fn dirty_at(&self, _: usize) -> bool {
        false
    }

    fn slice_at(&self, _: usize) {}
}

impl NewBitmap for Guarded {
    fn with_len(_: usize) -> Self {
        Self::default()
    }
}

impl BitmapReplace for Guarded {
    type InnerBitmap = ();

    fn replace(&self, (): ()) {}
}

fn mapping(region: &GuestRegionMmap<Guarded>) -> Option<&Arc<Mapping>> {
    (**region).bitmap().0.as_ref()
}

/// The memory, once all of it is in mappings of ours.
pub(super) fn look(memory: &Current) -> Snapshot {
    loop {
        let snapshot = memory.memory();
        if snapshot.iter().all(|region| mapping(region).is_some()) {
            return snapshot;
        }
        // Whoever has put the new table there is on the way to `guard`.
        std::thread::yield_now();
    }
}

/// Puts mappings of ours in the place of those that are not. If that can not be, there is no memory.
///
/// # Errors
/// That there is none.
pub(super) fn guard(memory: &Current) -> io::Result<()> {
    let guarded = guarded(&memory.memory());
    let (memory_then, outcome) = match guarded {
        Ok(guarded) => (guarded, Ok(())),
        Err(error) => (Memory::new(), Err(error)),
    };
    let lock = memory.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    lock.replace(memory_then);
    outcome
}

fn guarded(memory: &Memory) -> io::Result<Memory> {
    let regions = memory.iter().map(|region| {
        let mapped = match mapping(region) {
            Some(_) => region.get_mmap(),
            None => {
                let file = region.file_offset().ok_or(io::ErrorKind::InvalidInput)?;
                let mapping = Mapping::from_fd(
                    file.file(),
                    file.start(),
                    region.len(),
                    Protection::ReadWrite,
                )
                .map_err(io::Error::other)?;
                Arc::new(sys::region(mapping).map_err(io::Error::other)?)
            }
        };
        let region = GuestRegionMmap::with_arc(mapped, region.start_addr());
        Ok(region.ok_or(io::ErrorKind::InvalidInput)?)
    });
    let regions = regions.collect::<io::Result<Vec<_>>>()?;
    Memory::from_regions(regions).map_err(io::Error::other)
}

/// Whether part of the memory was lost: its file was truncated, or there are no pages for it.
pub(super) fn is_poisoned(memory: &Current) -> bool {
    memory.memory().iter().filter_map(mapping).any(|mapping| mapping.is_poisoned())
}
