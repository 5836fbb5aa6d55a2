//! When the calls on a file end, and how: what a test says in place of threads. For the fuzz
//! targets; nothing else may use it.

use super::flusher::Flusher;
use crate::sys::{End, Ring, ThreadsShared};
use parking_lot::Mutex;
use std::sync::Arc;

/// The calls and syncs of a disk that [`FileDisk::scripted`](super::FileDisk::scripted) has opened.
#[derive(Clone)]
pub struct Script {
    queues: Arc<Mutex<Vec<Arc<ThreadsShared>>>>,
    flusher: Arc<Flusher>,
}

impl std::fmt::Debug for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Script")
    }
}

impl Script {
    pub(super) fn new(flusher: Arc<Flusher>) -> Self {
        flusher.set_by_hand();
        Self { queues: Arc::default(), flusher }
    }

    /// Takes the calls of a ring.
    pub(super) fn adopt<T>(&self, mut ring: Ring<T>) -> Ring<T> {
        self.queues.lock().extend(ring.set_by_hand());
        ring
    }

    /// How many calls of a queue wait for their end. Queues are counted as they are opened.
    #[must_use]
    pub fn waiting(&self, queue: usize) -> usize {
        self.queues.lock().get(queue).map_or(0, |calls| calls.waiting())
    }

    /// Ends the `n`th call of a queue that waits, if there are so many.
    pub fn end(&self, queue: usize, n: usize, how: End) {
        let calls = self.queues.lock().get(queue).map(Arc::clone);
        if let Some(calls) = calls {
            calls.end_by_hand(n, how);
        }
    }

    /// Begins a sync, if somebody has asked for one and none is under way. Whether it has begun.
    #[must_use]
    pub fn begin_sync(&self) -> bool {
        self.flusher.begin_by_hand()
    }

    /// Ends the sync that is under way, with 0 or a negative error number. Whether there was one.
    pub fn end_sync(&self, result: i32) -> bool {
        self.flusher.end_by_hand(result)
    }
}
