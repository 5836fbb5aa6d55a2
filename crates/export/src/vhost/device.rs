//! virtio-blk device for one frontend: its queues, their threads, and the guest's memory.

use super::config::{self, feature};
use super::inflight::Kept;
use super::memory::{GuestMemory, Region};
use super::page_table_quota::PageTableQuota;
use super::queue::{BlkQueue, Served};
use super::ring::Ring;
use super::shared::DeviceShared;
use crate::failures::FailureCount;
use ::shadowbell_memory::DmaError;
use parking_lot::{Mutex, RwLock};
use rustix::event::{PollFd, PollFlags, poll};
use shadowbell_block::BlockDevice;
use std::io;
use std::ops::Deref;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Largest number of queues of a device.
const MAX_QUEUES: usize = 64;

/// virtio-blk device for one frontend.
pub(super) struct Device {
    queues: Vec<(Ring, Mutex<BlkQueue>)>,
    shared: DeviceShared,
}

impl Deref for Device {
    type Target = DeviceShared;

    fn deref(&self) -> &DeviceShared {
        &self.shared
    }
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
            shared: DeviceShared {
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
                is_loss_logged: AtomicBool::new(false),
            },
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

    /// Ends the threads of the queues. They do not end by themselves: even without its frontend, a
    /// guest could submit requests in the shared memory forever.
    pub(super) fn shut_down(&self) {
        self.shared.over.store(true, Ordering::SeqCst);
        self.changed();
    }

    /// Notifies the queues of a change of the memory or the features.
    fn changed(&self) {
        self.queues.iter().for_each(|(ring, _)| ring.changed());
    }

    /// Waits until the queue's thread no longer serves the queue, and then stops the queue.
    /// Meanwhile the thread answers the requests in flight, except requests to a hung disk.
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
                // Without the protocol features, no message enables a queue, so all queues are
                // enabled at once.
                config.enabled |= features & feature::PROTOCOL_FEATURES == 0;
            });
        }
        self.shared.acked.store(features, Ordering::Relaxed);
        self.changed();
    }

    /// Configuration space from `offset`. Bytes beyond the end read as zeroes.
    pub(super) fn configuration(&self, offset: usize, size: usize) -> Vec<u8> {
        let mut bytes = config::configuration(&self.geometry, self.queues());
        bytes.resize(bytes.len().max(offset + size), 0);
        bytes.get(offset..offset + size).unwrap_or_default().to_vec()
    }

    /// Replaces the guest's memory.
    pub(super) fn set_memory(&self, regions: Vec<Region>) -> Result<(), DmaError> {
        let memory = GuestMemory::new(regions)?;
        self.shared.page_table_quota.memory_changed(memory.lengths());
        *self.shared.memory.write() = memory;
        self.changed();
        Ok(())
    }
}
