//! Guest memory region of rust-vmm on a guarded mapping.

use super::guest_region::Guarded;
use ::shadowbell_memory::Mapping;
use std::sync::Arc;
use vm_memory::MmapRegion;
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};

/// Region on the whole mapping, which the region keeps alive.
pub(super) fn region(mapping: Arc<Mapping>) -> Result<MmapRegion<Guarded>, MmapRegionError> {
    let (address, len) = (mapping.address(), mapping.len());
    let builder = MmapRegionBuilder::new_with_bitmap(len, Guarded::new(mapping))
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE);
    // SAFETY: the range is that of the mapping, which is readable and writable, and which the
    // region holds by its bitmap until it is dropped. The region does not own the range, so it is
    // not unmapped otherwise.
    unsafe { builder.with_raw_mmap_pointer(std::ptr::with_exposed_provenance_mut(address)) }.build()
}
