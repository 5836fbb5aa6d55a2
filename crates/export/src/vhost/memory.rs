//! Guest memory in guarded mappings, so that its owner cannot crash this process.
//!
//! rust-vmm maps the files of the frontend. After a truncation of a file, an access to such a
//! mapping would raise SIGBUS. Therefore these mappings are never accessed: each is replaced by a
//! guarded mapping. After a truncation, a guarded mapping reads as zeroes and reports the loss
//! ([`Mapping::is_poisoned`]). A thread that needs the memory waits for the replacement.

use super::guest_region::Guarded;
use super::sys;
use ::shadowbell_memory::{Mapping, Protection, page_tables};
use std::io;
use std::sync::Arc;
use vm_memory::{
    GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryLoadGuard,
    GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap,
};

/// Guest memory of guarded regions.
pub(super) type Memory = GuestMemoryMmap<Guarded>;
/// Current guest memory, which can be replaced atomically.
pub(super) type Current = GuestMemoryAtomic<Memory>;
/// Snapshot of the guest memory.
pub(super) type Snapshot = GuestMemoryLoadGuard<Memory>;

fn mapping(region: &GuestRegionMmap<Guarded>) -> Option<&Arc<Mapping>> {
    (**region).bitmap().mapping()
}

/// Returns a snapshot of the memory. Waits until all of its regions are guarded mappings.
pub(super) fn look(memory: &Current) -> Snapshot {
    loop {
        let snapshot = memory.memory();
        if snapshot.iter().all(|region| mapping(region).is_some()) {
            return snapshot;
        }
        // The thread that has stored the new memory will call `guard` next.
        std::thread::yield_now();
    }
}

/// Replaces unguarded mappings by guarded ones. If that fails, the memory becomes empty.
///
/// # Errors
/// The error of the mapping.
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

/// Lengths of the regions.
pub(super) fn lengths(memory: &Current) -> Vec<u64> {
    memory.memory().iter().map(GuestMemoryRegion::len).collect()
}

/// True if a part of the memory was lost, because its file was truncated, or no huge pages were
/// left.
pub(super) fn is_poisoned(memory: &Current) -> bool {
    memory.memory().iter().filter_map(mapping).any(|mapping| mapping.is_poisoned())
}
