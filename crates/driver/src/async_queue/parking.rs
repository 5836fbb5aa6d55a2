//! Where the worker is while nobody drives the queue.

use super::shared::AsyncShared;
use super::worker::Worker;
use parking_lot::Mutex;
use std::sync::atomic::{Ordering, fence};

/// A queue's worker, while it is not with somebody who drives the queue.
pub(super) struct WorkerParking {
    pub(super) shared: AsyncShared,
    worker: Mutex<Option<Box<Worker>>>,
}

impl WorkerParking {
    /// For a worker that is to be parked here.
    pub(super) fn new(shared: AsyncShared) -> Self {
        Self { shared, worker: Mutex::new(None) }
    }

    /// Nobody drives the queue from here on. If there is something to do, its own thread is woken.
    pub(super) fn park(&self, worker: Box<Worker>) {
        if self.park_silently(worker) {
            self.shared.wake_thread();
        }
    }

    /// Nobody drives the queue from here on, and nobody is woken. Whether there is something to do.
    pub(super) fn park_silently(&self, worker: Box<Worker>) -> bool {
        let busy = worker.has_work();
        let mut parked = self.worker.lock();
        *parked = Some(worker);
        self.shared.set_parked(true);
        drop(parked);
        // Pairs with the one of `AsyncShared::nudge`: either we see the inbox, or they see that
        // nobody drives.
        fence(Ordering::SeqCst);
        busy || self.shared.has_inbox()
    }

    /// Whoever has the worker drives the queue.
    pub(super) fn unpark(&self) -> Option<Box<Worker>> {
        let mut parked = self.worker.lock();
        let worker = parked.take()?;
        self.shared.set_parked(false);
        Some(worker)
    }
}
