//! What all handles on a disk share, and a handle, which uses one queue of it.

use crate::buffers::{Buffers, Lease};
use crate::error::BlockError;
use crate::geometry::Geometry;
use crate::in_flight::{Abandoned, InFlight};
use crate::locks::{RangeGuard, RangeLocks};
use crate::range::BlockRange;
use crate::status::BlockStatus;
use shadowbell_driver::{Admin, AsyncNamespace, Command, Namespace};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One queue, with the buffers of the requests that go through it.
pub(crate) struct DeviceQueue {
    pub(crate) disk: AsyncNamespace,
    pub(crate) small: Arc<Buffers>,
    pub(crate) large: Arc<Buffers>,
}

pub(crate) struct DeviceShared {
    pub(crate) queues: Vec<DeviceQueue>,
    pub(crate) geometry: Geometry,
    /// Commands of one long request that are in flight at the same time.
    pub(crate) window: usize,
    pub(crate) locks: Arc<RangeLocks>,
    pub(crate) abandoned: Arc<Abandoned>,
    /// The controller has a Write Zeroes command, and has not refused one yet.
    pub(crate) write_zeroes: AtomicBool,
    /// The controller has a Copy command, and has not refused one yet.
    pub(crate) copy: AtomicBool,
    pub(crate) status: BlockStatus,
    pub(crate) admin: Admin,
}

/// A disk and one of its queues.
#[derive(Clone)]
pub(crate) struct Handle {
    pub(crate) shared: Arc<DeviceShared>,
    pub(crate) queue: usize,
}

impl Handle {
    pub(crate) fn geometry(&self) -> &Geometry {
        &self.shared.geometry
    }

    pub(crate) fn queue(&self) -> Result<&DeviceQueue, BlockError> {
        self.shared.queues.get(self.queue).ok_or(BlockError::BuffersLost)
    }

    pub(crate) fn namespace(&self) -> Result<&Namespace, BlockError> {
        Ok(self.queue()?.disk.namespace())
    }

    /// The blocks that these bytes touch.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Result<BlockRange, BlockError> {
        let geometry = self.geometry();
        let size = geometry.bytes;
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(BlockRange::of(offset, end, geometry.block_size.into())),
            _ => Err(BlockError::OutOfRange { offset, len, size }),
        }
    }

    /// The blocks that these bytes touch, which are to be changed.
    pub(crate) fn range_to_change(&self, offset: u64, len: u64) -> Result<BlockRange, BlockError> {
        if self.geometry().read_only { Err(BlockError::ReadOnly) } else { self.range(offset, len) }
    }

    /// Waits until the range may be written; nothing if there is nothing in it.
    pub(crate) async fn lock(&self, range: &BlockRange) -> Option<Arc<RangeGuard>> {
        if range.start == range.end {
            return None;
        }
        let alone = range.edges().next().is_some();
        Some(Arc::new(self.shared.locks.acquire(range.start, range.end, alone).await))
    }

    /// A command on this handle's queue, submitted when it is first polled.
    pub(crate) fn command(
        &self,
        command: Command,
        lease: Option<Lease>,
        guard: Option<Arc<RangeGuard>>,
    ) -> Result<InFlight, BlockError> {
        let abandoned = &self.shared.abandoned;
        Ok(InFlight::new(self.queue()?.disk.queue(), command, lease, guard, abandoned))
    }

    /// The controller refused Write Zeroes: from now on, zeroes are written.
    pub(crate) fn forget_write_zeroes(&self) {
        if self.shared.write_zeroes.swap(false, Ordering::Relaxed) {
            tracing::warn!("the controller refuses Write Zeroes; zeroes are written instead");
        }
    }

    /// The controller refused Copy: from now on, bytes are read and written.
    pub(crate) fn forget_copy(&self) {
        if self.shared.copy.swap(false, Ordering::Relaxed) {
            tracing::warn!("the controller refuses Copy; bytes are read and written instead");
        }
    }
}
