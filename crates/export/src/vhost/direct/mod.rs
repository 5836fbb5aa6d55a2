//! virtio queues that are served directly on the disk, if the disk is in this process.
//!
//! Otherwise, a request passes from the thread of its virtio queue to the controller's I/O thread
//! as an NVMe command, and back, and its data is copied on the way. A direct queue's thread has a
//! queue of the disk itself, which transfers the data between the disk and the guest's memory: no
//! other thread is woken, and nothing is copied in between. The thread polls the available ring
//! for a while before it sleeps, and suppresses notifications meanwhile.
//!
//! A write of a partial block is a read-modify-write, which excludes other writes of that block.
//! The locks of `shadowbell_block` ensure that, but the direct way bypasses them. Therefore a
//! disk is served directly only if it has no other users and blocks of virtio's sector size: each
//! request then consists of whole blocks.

mod poll_window;
mod queue;
mod request;
mod sleep;
mod split_ring;

pub(super) use queue::{Context, DirectQueue};
pub(super) use split_ring::SplitRing;

use super::guest_region::Guarded;
use super::memory::{Current, look};
use super::request::SECTOR;
use crate::local_disk::LocalDisk;
use ::shadowbell_memory::{DmaSpace, DmaTable};
use shadowbell_block::Geometry;
use std::sync::Arc;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

/// True if queues can be served directly on this disk.
pub(super) fn may_serve(local: &LocalDisk, geometry: &Geometry) -> bool {
    u64::from(geometry.block_size) == SECTOR && local.is_all_of(geometry)
}

/// DMA table of the guest's memory by guest address. `None` if a region is no guarded mapping.
pub(super) fn table(memory: &Current) -> Option<Arc<DmaTable>> {
    let mut space = DmaSpace::default();
    for region in look(memory).iter() {
        let bytes = guarded(region)?.mapping()?.bytes();
        space.map(region.start_addr().0, region.len(), &bytes).ok()?;
    }
    Some(Arc::clone(space.table()))
}

fn guarded(region: &GuestRegionMmap<Guarded>) -> Option<&Guarded> {
    Some((**region).bitmap())
}
