//! State that the queues of a device share.

use super::config::feature;
use super::inflight::Kept;
use super::memory::GuestMemory;
use super::page_table_quota::PageTableQuota;
use super::request::Rules;
use crate::failures::FailureCount;
use parking_lot::{RwLock, RwLockReadGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_block::Geometry;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

pub(super) struct DeviceShared {
    pub(super) geometry: Geometry,
    /// Serial number of the device, for `VIRTIO_BLK_T_GET_ID`.
    pub(super) id: Vec<u8>,
    pub(super) memory: RwLock<GuestMemory>,
    pub(super) page_table_quota: PageTableQuota,
    /// Features that the guest's driver has accepted.
    pub(super) acked: AtomicU64,
    /// In-flight tracking memory of the queues.
    pub(super) inflight: Kept,
    pub(super) failures: Arc<FailureCount>,
    /// Socket of the frontend, for a disconnect.
    pub(super) socket: UnixStream,
    /// True once the frontend has disconnected, so that the threads of the queues end.
    pub(super) over: AtomicBool,
    /// True once the server ends.
    pub(super) ending: Arc<AtomicBool>,
    /// True once a loss of guest memory was logged.
    pub(super) is_loss_logged: AtomicBool,
}

impl DeviceShared {
    pub(super) fn memory(&self) -> RwLockReadGuard<'_, GuestMemory> {
        self.memory.read()
    }

    #[inline]
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// True if the frontend has disconnected, also while its last message is being handled.
    pub(super) fn is_disconnected(&self) -> bool {
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        self.is_over() || poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    pub(super) fn rules(&self) -> Rules {
        let acked = self.acked.load(Ordering::Relaxed);
        let write_through = self.geometry.volatile_cache && acked & feature::FLUSH == 0;
        Rules { geometry: self.geometry, write_through }
    }

    /// True if part of the guest's memory was lost and replaced by zeroes. The frontend is
    /// disconnected then.
    pub(super) fn has_lost_memory(&self) -> bool {
        let lost = self.memory.read().is_poisoned()
            || self.inflight.get().is_some_and(|region| region.is_poisoned());
        // The loss is logged only once, because the check of each later request finds it again.
        if lost && !self.is_loss_logged.swap(true, Ordering::Relaxed) {
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
