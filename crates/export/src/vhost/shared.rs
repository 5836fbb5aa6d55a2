//! State that the queues of a device share.

use super::config::feature;
use super::inflight::Kept;
use super::memory::{Current, is_poisoned};
use super::page_table_quota::PageTableQuota;
use super::request::Rules;
use crate::failures::FailureCount;
use parking_lot::RwLock;
use shadowbell_block::Geometry;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(super) struct DeviceShared {
    pub(super) geometry: Geometry,
    /// Serial number of the device, for `VIRTIO_BLK_T_GET_ID`.
    pub(super) id: Vec<u8>,
    pub(super) memory: RwLock<Option<Current>>,
    pub(super) page_table_quota: PageTableQuota,
    /// Features that the guest's driver has accepted.
    pub(super) acked: AtomicU64,
    /// In-flight tracking memory of the queues.
    pub(super) inflight: Arc<Kept>,
    pub(super) failures: Arc<FailureCount>,
    /// Socket of the frontend, needed to disconnect it.
    pub(super) socket: UnixStream,
    /// True after the frontend has disconnected. Then the threads of the queues end.
    pub(super) over: AtomicBool,
    /// True when the server ends.
    pub(super) ending: Arc<AtomicBool>,
    /// Number of changes of the memory or the features.
    pub(super) changes: AtomicU64,
}

impl DeviceShared {
    /// Returns an error if the calling thread of a queue must end. The error ends the thread.
    /// (rust-vmm has an exit descriptor for this purpose, but does not close it.)
    pub(super) fn check_over(&self) -> io::Result<()> {
        if self.is_over() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// Number that changes with the memory or the features.
    #[inline]
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::SeqCst)
    }

    pub(super) fn rules(&self) -> Rules {
        let acked = self.acked.load(Ordering::Relaxed);
        let write_through = self.geometry.volatile_cache && acked & feature::FLUSH == 0;
        Rules { geometry: self.geometry, write_through }
    }

    /// True if a part of the guest's memory was lost and replaced by zeroes. In this case the
    /// frontend is disconnected.
    pub(super) fn has_lost_memory(&self) -> bool {
        let lost = self.memory.read().as_ref().is_some_and(is_poisoned)
            || self.inflight.get().is_some_and(|region| region.is_poisoned());
        if lost {
            tracing::error!(
                "guest memory was lost (its file was truncated, or no huge pages are left), so the \
                 frontend is disconnected"
            );
            self.hang_up();
        }
        lost
    }

    /// Disconnects the frontend.
    pub(super) fn hang_up(&self) {
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}
