//! State of a block device that all of its queues share.

use crate::extents::ExtentQueries;
use crate::geometry::Geometry;
use crate::locks::RangeLocks;
use crate::options::BlockOptions;
use crate::traffic::TrafficCounters;
use shadowbell_disk::Disk;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Disk, options and locks of a block device.
pub(crate) struct DeviceShared {
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) geometry: Geometry,
    pub(crate) options: BlockOptions,
    pub(crate) locks: Arc<RangeLocks>,
    /// True if the disk can zero ranges by itself and has not refused to do so.
    pub(crate) write_zeroes: AtomicBool,
    pub(crate) queries: Arc<ExtentQueries>,
    pub(crate) traffic: Arc<TrafficCounters>,
}

impl DeviceShared {
    pub(crate) fn new(
        disk: Arc<dyn Disk>,
        options: &BlockOptions,
        locks: Arc<RangeLocks>,
        queries: Arc<ExtentQueries>,
        traffic: Arc<TrafficCounters>,
    ) -> Self {
        let geometry = Geometry::of(&disk.info(), options.read_only);
        let write_zeroes = AtomicBool::new(geometry.write_zeroes);
        Self { disk, geometry, options: *options, locks, write_zeroes, queries, traffic }
    }

    /// Records that the disk has refused to zero a range. Later requests write zeroes as data.
    pub(crate) fn forget_write_zeroes(&self) {
        if self.write_zeroes.swap(false, Ordering::Relaxed) {
            tracing::warn!(
                "{}: write zeroes is not supported; zeroes are written instead",
                self.disk.name()
            );
        }
    }
}
