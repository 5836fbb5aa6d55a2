//! Test script by which a fuzz target completes the system calls on a file, in any order and with
//! any result. Without a script, threads execute them.

use super::flusher::Flusher;
use crate::sys::{CallOutcome, Ring, ThreadsShared};
use parking_lot::Mutex;
use std::sync::Arc;

/// Calls and syncs of a disk opened by [`FileDisk::scripted`](super::FileDisk::scripted).
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
        flusher.set_scripted();
        Self { queues: Arc::default(), flusher }
    }

    /// Adds a ring to the script. Then the script completes the calls of the ring.
    pub(super) fn adopt<T>(&self, mut ring: Ring<T>) -> Ring<T> {
        self.queues.lock().extend(ring.set_scripted());
        ring
    }

    /// Number of pending calls of a queue. Queues are numbered in the order in which they were
    /// opened.
    #[must_use]
    pub fn waiting(&self, queue: usize) -> usize {
        self.queues.lock().get(queue).map_or(0, |calls| calls.waiting())
    }

    /// Ends the `n`th pending call of a queue as `how` determines. No effect if the queue has fewer
    /// pending calls.
    pub fn end(&self, queue: usize, n: usize, how: CallOutcome) {
        let calls = self.queues.lock().get(queue).map(Arc::clone);
        if let Some(calls) = calls {
            calls.end_scripted(n, how);
        }
    }

    /// Starts a sync if one was requested and none is in flight. Returns true if it has started.
    #[must_use]
    pub fn begin_sync(&self) -> bool {
        self.flusher.begin_scripted()
    }

    /// Ends the sync in flight with `result`: 0 or a negative error number. Returns false if no
    /// sync was in flight.
    pub fn end_sync(&self, result: i32) -> bool {
        self.flusher.end_scripted(result)
    }
}
