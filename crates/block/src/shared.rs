//! State shared by all handles of a disk, and the handle with its queue.

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

/// A queue with the buffers of its requests.
pub(crate) struct DeviceQueue {
    pub(crate) disk: AsyncNamespace,
    pub(crate) small: Arc<Buffers>,
    pub(crate) large: Arc<Buffers>,
}

pub(crate) struct DeviceShared {
    pub(crate) queues: Vec<DeviceQueue>,
    pub(crate) geometry: Geometry,
    /// Maximum number of commands in flight for one long request.
    pub(crate) window: usize,
    pub(crate) locks: Arc<RangeLocks>,
    pub(crate) abandoned: Arc<Abandoned>,
    /// True if the controller has Write Zeroes and has not refused it yet.
    pub(crate) write_zeroes: AtomicBool,
    /// True if the controller has Copy and has not refused it yet.
    pub(crate) copy: AtomicBool,
    pub(crate) status: BlockStatus,
    pub(crate) admin: Admin,
}

/// A disk and the number of the queue that this handle uses.
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

    /// Splits a range into blocks, after a check against the disk's size.
    pub(crate) fn range(&self, offset: u64, len: u64) -> Result<BlockRange, BlockError> {
        let geometry = self.geometry();
        let size = geometry.bytes;
        match offset.checked_add(len) {
            Some(end) if end <= size => Ok(BlockRange::of(offset, end, geometry.block_size.into())),
            _ => Err(BlockError::OutOfRange { offset, len, size }),
        }
    }

    /// As [`range`](Self::range), for a change: fails if the disk is read-only.
    pub(crate) fn range_to_change(&self, offset: u64, len: u64) -> Result<BlockRange, BlockError> {
        if self.geometry().read_only { Err(BlockError::ReadOnly) } else { self.range(offset, len) }
    }

    /// Locks a range for writing: exclusively if it has partial blocks. `None` for an empty range.
    pub(crate) async fn lock(&self, range: &BlockRange) -> Option<Arc<RangeGuard>> {
        if range.start == range.end {
            return None;
        }
        let alone = range.edges().next().is_some();
        Some(Arc::new(self.shared.locks.acquire(range.start, range.end, alone).await))
    }

    /// Creates a command on this handle's queue. It is submitted when it is first polled.
    pub(crate) fn command(
        &self,
        command: Command,
        lease: Option<Lease>,
        guard: Option<Arc<RangeGuard>>,
    ) -> Result<InFlight, BlockError> {
        let abandoned = &self.shared.abandoned;
        Ok(InFlight::new(self.queue()?.disk.queue(), command, lease, guard, abandoned))
    }

    /// Records that the controller refused Write Zeroes: later requests write zeroes.
    pub(crate) fn forget_write_zeroes(&self) {
        if self.shared.write_zeroes.swap(false, Ordering::Relaxed) {
            tracing::warn!("the controller refuses Write Zeroes; zeroes are written instead");
        }
    }

    /// Records that the controller refused Copy: later requests read and write.
    pub(crate) fn forget_copy(&self) {
        if self.shared.copy.swap(false, Ordering::Relaxed) {
            tracing::warn!("the controller refuses Copy; bytes are read and written instead");
        }
    }
}
