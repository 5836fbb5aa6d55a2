//! virtio-blk device for one frontend: its queues, their threads, and the guest's memory.

use super::config::{self, feature};
use super::inflight::Kept;
use super::memory::{GuestMemory, Region};
use super::page_table_quota::PageTableQuota;
use super::queue::{BlkQueue, Served};
use super::request::Rules;
use super::ring::Ring;
use crate::failures::FailureCount;
use ::shadowbell_memory::DmaError;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_block::{BlockDevice, Geometry};
use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Largest number of queues of a device.
const MAX_QUEUES: usize = 64;

/// virtio-blk device for one frontend.
pub(super) struct Device {
    queues: Vec<(Ring, Mutex<BlkQueue>)>,
    pub(super) geometry: Geometry,
    /// Serial number of the device, for `VIRTIO_BLK_T_GET_ID`.
    pub(super) id: Vec<u8>,
    memory: RwLock<GuestMemory>,
    pub(super) page_table_quota: PageTableQuota,
    /// Features that the guest's driver has accepted.
    pub(super) acked: AtomicU64,
    /// In-flight tracking memory of the queues.
    pub(super) inflight: Kept,
    pub(super) failures: Arc<FailureCount>,
    /// Socket of the frontend, for a disconnect.
    socket: UnixStream,
    /// True once the frontend has disconnected, so that the threads of the queues end.
    over: AtomicBool,
    /// True once the server ends.
    ending: Arc<AtomicBool>,
}

impl Device {
    /// Creates the device for the frontend at the other end of `socket`.
    pub(super) fn new(
        disk: &BlockDevice,
        id: &str,
        failures: Arc<FailureCount>,
        (socket, ending): (UnixStream, Arc<AtomicBool>),
    ) -> io::Result<Self> {
        let count = disk.queues().min(MAX_QUEUES);
        let queue = |index| Ok((Ring::new()?, Mutex::new(BlkQueue::new(disk, index))));
        Ok(Self {
            queues: (0..count).map(queue).collect::<io::Result<_>>()?,
            geometry: *disk.geometry(),
            id: id.as_bytes().to_vec(),
            memory: RwLock::new(GuestMemory::new(Vec::new()).map_err(io::Error::other)?),
            page_table_quota: PageTableQuota::new(count),
            acked: AtomicU64::new(0),
            inflight: Kept::default(),
            failures,
            socket,
            over: AtomicBool::new(false),
            ending,
        })
    }

    pub(super) fn queues(&self) -> usize {
        self.queues.len()
    }

    pub(super) fn ring(&self, index: usize) -> Option<&Ring> {
        Some(&self.queues.get(index)?.0)
    }

    /// Main function of the thread of a queue. It returns when the frontend has disconnected.
    pub(super) fn run_queue(&self, index: usize) {
        let Some((ring, queue)) = self.queues.get(index) else { return };
        loop {
            ring.event().drain();
            if self.is_over() {
                return;
            }
            let runs = ring.config().runs();
            let served = if runs { queue.lock().serve(self, ring) } else { Served::Refused };
            if served == Served::UntilChange {
                continue;
            }
            // After the next notification, an invalid queue may be valid again.
            let kick = if served == Served::Impossible { ring.kick() } else { None };
            let events = [Some(ring.event()), kick.as_ref()].into_iter().flatten();
            let mut fds: Vec<_> = events.map(|event| PollFd::new(event, PollFlags::IN)).collect();
            let _ = poll(&mut fds, None);
            if let Some(kick) = &kick {
                kick.drain();
            }
        }
    }

    /// Ends the threads of the queues. A guest shares its memory and could keep them busy
    /// forever, even without its frontend.
    pub(super) fn leave(&self) {
        self.over.store(true, Ordering::SeqCst);
        self.changed();
    }

    /// Notifies the queues of a change of the memory or the features.
    fn changed(&self) {
        self.queues.iter().for_each(|(ring, _)| ring.changed());
    }

    /// Stops a queue after its thread has left it. The requests taken from the queue are answered,
    /// or the disk does not complete them.
    pub(super) fn stop_queue(&self, index: usize) {
        if let Some((_, queue)) = self.queues.get(index) {
            queue.lock().stop();
        }
    }

    /// Sets the features that the guest's driver accepts.
    pub(super) fn set_features(&self, features: u64) {
        for (ring, _) in &self.queues {
            ring.change(|config| {
                config.event_idx = features & feature::EVENT_IDX != 0;
                // Without the protocol features, there is no message that enables a queue.
                config.enabled |= features & feature::PROTOCOL_FEATURES == 0;
            });
        }
        self.acked.store(features, Ordering::Relaxed);
        self.changed();
    }

    /// Configuration space from `offset`. Bytes beyond the end read as zeroes.
    pub(super) fn configuration(&self, offset: usize, size: usize) -> Vec<u8> {
        let mut bytes = config::configuration(&self.geometry, self.queues());
        bytes.resize(bytes.len().max(offset + size), 0);
        bytes.get(offset..offset + size).unwrap_or_default().to_vec()
    }

    pub(super) fn memory(&self) -> RwLockReadGuard<'_, GuestMemory> {
        self.memory.read()
    }

    /// Replaces the guest's memory.
    pub(super) fn set_memory(&self, regions: Vec<Region>) -> Result<(), DmaError> {
        let memory = GuestMemory::new(regions)?;
        self.page_table_quota.memory_changed(memory.lengths());
        *self.memory.write() = memory;
        self.changed();
        Ok(())
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
