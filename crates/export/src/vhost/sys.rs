//! Guest memory region of rust-vmm that consists of a guarded mapping.

use super::guest_region::Guarded;
use ::shadowbell_memory::Mapping;
use std::sync::Arc;
use vm_memory::MmapRegion;
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};

/// Creates a region of the whole mapping. The region keeps the mapping alive.
pub(super) fn region(mapping: Arc<Mapping>) -> Result<MmapRegion<Guarded>, MmapRegionError> {
    let (address, len) = (mapping.address(), mapping.len());
    let builder = MmapRegionBuilder::new_with_bitmap(len, Guarded::new(mapping))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE);
    // SAFETY: the range is that of the mapping, which is readable and writable. The region holds
    // the mapping in its bitmap until it is dropped. The region does not own the range, so it does
    // not unmap the range.
    unsafe { builder.with_raw_mmap_pointer(std::ptr::with_exposed_provenance_mut(address)) }.build()
}
