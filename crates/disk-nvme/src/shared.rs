//! State shared by all queues of a disk.

use crate::disconnect::DisconnectMonitor;
use crate::dma_share::DmaShares;
use crate::transfer_stats::DiskTransferStats;
use parking_lot::Mutex;
use shadowbell_disk::DiskInfo;
use shadowbell_driver::{Controller, Namespace};
use std::sync::{Arc, OnceLock};

pub(crate) struct NvmeDiskShared {
    pub(crate) namespace: Namespace,
    pub(crate) info: DiskInfo,
    /// Memory that the SSD can access directly. `None` if all data are copied.
    pub(crate) shares: Option<Arc<DmaShares>>,
    pub(crate) name: String,
    pub(crate) transfers: DiskTransferStats,
    pub(crate) disconnect: DisconnectMonitor,
    /// Entries per queue pair.
    pub(crate) depth: u32,
    /// Cached result of the query if the SSD can report which blocks are allocated.
    pub(crate) reports_allocated: OnceLock<bool>,
    pub(crate) controller: Arc<Mutex<Controller>>,
}
