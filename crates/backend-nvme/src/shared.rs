//! What all queues of a disk share.

use crate::dma_share::DmaShares;
use crate::hang_up::HangUpMonitor;
use crate::transfers::DiskTransfers;
use parking_lot::Mutex;
use shadowbell_backend::DiskInfo;
use shadowbell_driver::{Controller, Namespace};
use std::sync::{Arc, OnceLock};

pub(crate) struct NvmeDiskShared {
    pub(crate) namespace: Namespace,
    pub(crate) info: DiskInfo,
    /// Memory that the SSD reaches itself; none if everything is to be copied.
    pub(crate) shares: Option<Arc<DmaShares>>,
    pub(crate) name: String,
    pub(crate) transfers: DiskTransfers,
    pub(crate) hang_up: HangUpMonitor,
    /// Entries of each queue pair.
    pub(crate) depth: u32,
    /// Whether it says which blocks are allocated, once that was asked.
    pub(crate) reports_allocated: OnceLock<bool>,
    pub(crate) controller: Arc<Mutex<Controller>>,
}
