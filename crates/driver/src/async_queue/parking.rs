//! Parking of the [`Worker`] while no thread drives the queue.

use super::shared::AsyncShared;
use super::worker::Worker;
use parking_lot::Mutex;
use std::sync::atomic::{Ordering, fence};

/// Holds a queue's [`Worker`] while no thread drives the queue.
pub(super) struct WorkerParking {
    pub(super) shared: AsyncShared,
    worker: Mutex<Option<Box<Worker>>>,
}

impl WorkerParking {
    /// Creates an empty parking for the worker of `shared`.
    pub(super) fn new(shared: AsyncShared) -> Self {
        Self { shared, worker: Mutex::new(None) }
    }

    /// Parks the worker: no thread drives the queue. Wakes the queue thread if there is work.
    pub(super) fn park(&self, worker: Box<Worker>) {
        if self.park_silently(worker) {
            self.shared.wake_thread();
        }
    }

    /// Parks the worker without waking the queue thread. Returns true if there is work.
    pub(super) fn park_silently(&self, worker: Box<Worker>) -> bool {
        let busy = worker.has_work();
        let mut parked = self.worker.lock();
        *parked = Some(worker);
        self.shared.set_parked(true);
        drop(parked);
        // Pairs with the fence in `AsyncShared::nudge`: either this thread sees the inbox, or the
        // submitter sees `parked` and wakes the queue thread. Without the fences, both could miss
        // the other's store, and the command would wait.
        fence(Ordering::SeqCst);
        busy || self.shared.has_inbox()
    }

    /// Takes the worker, and with it the right to drive the queue. `None` if another thread drives.
    pub(super) fn unpark(&self) -> Option<Box<Worker>> {
        let mut parked = self.worker.lock();
        let worker = parked.take()?;
        self.shared.set_parked(false);
        Some(worker)
    }
}
