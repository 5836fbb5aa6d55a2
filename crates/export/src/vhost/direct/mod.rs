//! A queue that is served straight from the disk, where the disk is in this process.
//!
//! Otherwise a request goes from the thread of its virtio queue to the controller's worker as an
//! NVMe command, and back, and its data are copied on the way. Here the queue's thread has a queue
//! of the disk itself, which moves the data between the disk and the guest's memory: no other thread
//! is woken, and nothing is copied in between. It polls the available ring for a while before it
//! sleeps, and asks for no notifications as long as it does.
//!
//! Whoever writes parts of blocks reads the blocks first, and nobody may write them meanwhile. That
//! is kept by locks of `shadowbell_block`, which nothing here knows. So a disk is served like this
//! only if it is served in no other way, and has blocks as large as virtio's sectors: then each
//! request is of whole blocks.

mod poll_window;
mod queue;
mod request;
mod sleep;
mod split_ring;

pub(super) use queue::{Context, DirectQueue};
pub(super) use split_ring::SplitRing;

use super::guarded::Guarded;
use super::memory::{Current, look};
use super::request::SECTOR;
use crate::local_disk::LocalDisk;
use ::shadowbell_memory::{DmaSpace, DmaTable};
use shadowbell_block::Geometry;
use std::sync::Arc;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

/// Whether queues can be served straight from this disk.
pub(super) fn may_serve(local: &LocalDisk, geometry: &Geometry) -> bool {
    u64::from(geometry.block_size) == SECTOR && local.is_all_of(geometry)
}

/// The guest's memory, by its addresses. Nothing, if it is not all mapped by us.
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
