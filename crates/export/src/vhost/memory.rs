//! The guest's memory, mapped so that its owner can not take this process down with it.
//!
//! rust-vmm maps what the frontend sends, and touching a page whose file was truncated would raise
//! SIGBUS. So nothing here touches those mappings: each is replaced by one of our own, which reads
//! as zeroes then and says so ([`Mapping::is_poisoned`]). Between the two, a thread that looks at
//! the memory waits.

use super::guarded::Guarded;
use super::sys;
use ::shadowbell_memory::{Mapping, Protection, page_tables};
use std::io;
use std::sync::Arc;
use vm_memory::{
    GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryLoadGuard,
    GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};

/// A guest's memory.
pub(super) type Memory = GuestMemoryMmap<Guarded>;
/// The guest's memory as it is at the moment.
pub(super) type Current = GuestMemoryAtomic<Memory>;
/// The guest's memory as it was at one moment.
pub(super) type Snapshot = GuestMemoryLoadGuard<Memory>;

fn mapping(region: &GuestRegionMmap<Guarded>) -> Option<&Arc<Mapping>> {
    (**region).bitmap().mapping()
}

/// The memory, once all of it is in mappings of ours.
pub(super) fn look(memory: &Current) -> Snapshot {
    loop {
        let snapshot = memory.memory();
        if snapshot.iter().all(|region| mapping(region).is_some()) {
            return snapshot;
        }
        // The thread that has put the new table there is about to call `guard`.
        std::thread::yield_now();
    }
}

/// Puts mappings of ours in the place of those that are not. If that can not be, there is no
/// memory.
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
                page_tables::watch(&mapping);
                Arc::new(sys::region(mapping).map_err(io::Error::other)?)
            }
        };
        let region = GuestRegionMmap::with_arc(mapped, region.start_addr());
        Ok(region.ok_or(io::ErrorKind::InvalidInput)?)
    });
    let regions = regions.collect::<io::Result<Vec<_>>>()?;
    Memory::from_regions(regions).map_err(io::Error::other)
}

/// The lengths of its regions.
pub(super) fn lengths(memory: &Current) -> Vec<u64> {
    memory.memory().iter().map(GuestMemoryRegion::len).collect()
}

/// Whether part of the memory was lost: its file was truncated, or there are no pages for it.
pub(super) fn is_poisoned(memory: &Current) -> bool {
    memory.memory().iter().filter_map(mapping).any(|mapping| mapping.is_poisoned())
}
