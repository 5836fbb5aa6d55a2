//! State of a virtio queue between the times in which a thread serves it.

use super::inflight::{Found, Inconsistent, Tracker};
use super::ring::{Config, Ring};
use super::serve::{Context, ServedQueue, execute};
use super::shared::DeviceShared;
use super::split_ring::SplitRing;
use ::shadowbell_memory::{DmaTable, SharedBytes};
use shadowbell_block::BlockDevice;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Result of an attempt to serve a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Served {
    /// The queue was served until its configuration or the memory changed.
    UntilChange,
    /// The queue cannot be served in its current configuration.
    Impossible,
    /// The queue is not served: it is stopped, the guest's memory was lost, or the in-flight
    /// tracking is inconsistent.
    Refused,
}

/// virtio queue, and the state of its thread.
pub(super) struct BlkQueue {
    disk: BlockDevice,
    index: usize,
    /// Heads of the requests that are executed again: a dead process had them in flight, or the
    /// disk held them when the queue was last served.
    replays: VecDeque<u16>,
    /// True if the queue was prepared after its last start by the frontend.
    has_begun: bool,
    /// In-flight tracking, if the frontend has shared memory for it.
    tracker: Option<Tracker<SharedBytes>>,
    /// Value of [`shadowbell_memory::sigbus::faults`] at the last check.
    faults: u64,
    /// True if an invalid queue was already logged as a warning.
    is_logged: bool,
}

impl BlkQueue {
    pub(super) fn new(disk: &BlockDevice, index: usize) -> Self {
        Self {
            disk: disk.clone(),
            index,
            replays: VecDeque::new(),
            has_begun: false,
            tracker: None,
            faults: ::shadowbell_memory::sigbus::faults(),
            is_logged: false,
        }
    }

    /// Logs that the guest's queue is invalid: the first time as a warning, later as debug output.
    fn log_error(&mut self, error: &dyn std::fmt::Display) {
        log_error(&mut self.is_logged, self.index, error);
    }

    /// Prepares the queue after a start by the frontend, and finds the requests that a dead process
    /// had in flight. Returns true if the queue may be served.
    fn begin_queue(&mut self, device: &DeviceShared, vring: &Ring) -> bool {
        if self.has_begun {
            return true;
        }
        if let Some(region) = device.inflight.get() {
            let words = region.queue(self.index);
            let Config { size, next_used: used, .. } = *vring.config();
            let started = words
                .ok_or(Inconsistent::None)
                .and_then(|words| Tracker::start(words, region.entries(), size, used));
            match started {
                Ok((tracker, found)) => {
                    self.tracker = Some(tracker);
                    if let Some(found) = found {
                        self.resume(vring, &found);
                    }
                }
                Err(error) => {
                    self.tracker = None;
                    tracing::warn!(
                        queue = self.index,
                        "the frontend is sent away: the memory with its requests in flight makes \
                         no sense: {error}"
                    );
                    device.hang_up();
                    return false;
                }
            }
        }
        self.has_begun = true;
        true
    }

    /// Restores the queue's position from the in-flight tracking, after the death of a process or
    /// after a stop of the queue. The requests that were in flight are executed again.
    fn resume(&mut self, vring: &Ring, found: &Found) {
        self.replays = found.heads.iter().copied().collect();
        vring.config().next_available = found.available;
        if !found.heads.is_empty() {
            let (queue, requests) = (self.index, found.heads.len());
            tracing::info!(queue, requests, "requests of a process before are carried out again");
        }
        // The dead process may have ended before it notified the guest of its last answers.
        vring.signal();
    }

    /// Serves the queue until its configuration or the memory changes.
    pub(super) fn serve(&mut self, device: &DeviceShared, vring: &Ring) -> Served {
        let (disk, index) = (self.disk.clone(), self.index);
        let mut is_logged = self.is_logged;
        let served = self.serve_by(device, vring, |context, ring, table| {
            let queue = ServedQueue::new(context, ring, table, &disk, execute)?;
            queue.serve(&mut |error| log_error(&mut is_logged, index, error));
            Ok(())
        });
        self.is_logged |= is_logged;
        served
    }

    /// Implementation of [`serve`](Self::serve), with `run` as the serving function.
    pub(super) fn serve_by(
        &mut self,
        device: &DeviceShared,
        vring: &Ring,
        run: impl FnOnce(Context<'_>, SplitRing, &Arc<DmaTable>) -> io::Result<()>,
    ) -> Served {
        self.faults = ::shadowbell_memory::sigbus::faults();
        if device.has_lost_memory() {
            return Served::Refused;
        }
        let find = || {
            let table = Arc::clone(&device.memory().table);
            let ring = SplitRing::new(&vring.config(), &table)?;
            Some((table, ring))
        };
        let nowhere = "a ring is not in one region of the guest's memory";
        if find().is_none() {
            self.log_error(&nowhere);
            return Served::Impossible;
        }
        if !self.begin_queue(device, vring) {
            return Served::Refused;
        }
        let _serving = vring.begin_serving();
        let seen = vring.changes();
        // If the queue is stopped after this check, its change counter differs from `seen`. If it
        // was stopped before, `runs` returns false.
        if !vring.config().runs() {
            return Served::UntilChange;
        }
        // The memory and the ring may have changed before the counter was read, so both are
        // looked up again.
        let Some((table, ring)) = find() else {
            self.log_error(&nowhere);
            return Served::Impossible;
        };
        let context = Context {
            index: self.index,
            device,
            vring,
            tracker: &mut self.tracker,
            replays: &mut self.replays,
            seen,
            faults: self.faults,
        };
        match run(context, ring, &table) {
            Ok(()) => Served::UntilChange,
            Err(error) => {
                tracing::warn!(queue = self.index, "a queue cannot be served: {error}");
                Served::Impossible
            }
        }
    }

    /// Stops the queue, at the frontend's request or after its disconnection. The caller has waited
    /// for the requests in flight; only requests of a hung disk may remain.
    pub(super) fn stop(&mut self) {
        self.has_begun = false;
        self.tracker = None;
        // The requests that are discarded here are still recorded in the in-flight tracking, so the
        // next start of the queue executes them.
        self.replays.clear();
    }
}

fn log_error(is_logged: &mut bool, queue: usize, error: &dyn std::fmt::Display) {
    if std::mem::replace(is_logged, true) {
        tracing::debug!(queue, "the guest's queue makes no sense: {error}");
    } else {
        tracing::warn!(queue, "the guest's queue makes no sense: {error}");
    }
}
