//! Completions of a queue's librbd calls, and the orphans among these calls.

use parking_lot::Mutex;
use shadowbell_disk::{CompletionQueue, Orphan, Orphans};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::task::Wake;

/// Completed call.
#[derive(Debug)]
pub(crate) struct CallResult {
    pub(crate) id: u64,
    /// Return value; negative for an error number.
    pub(crate) value: i64,
    /// Buffer of the call.
    pub(crate) buffer: Vec<u8>,
}

/// Completion queue of a disk queue. Each call in flight has a reference to it, so it exists until
/// the last call has completed, even if the disk queue is dropped before.
pub(crate) struct Completions {
    pub(crate) queue: CompletionQueue<CallResult>,
    disk: Arc<Orphans>,
    /// Cancelled writes whose librbd calls are still in flight, by the id of the call.
    orphans: Mutex<HashMap<u64, Orphan>>,
}

impl Completions {
    pub(crate) fn new(disk: &Arc<Orphans>) -> io::Result<Self> {
        let disk = Arc::clone(disk);
        Ok(Self { queue: CompletionQueue::new()?, disk, orphans: Mutex::default() })
    }

    /// Adds the completion of a call. Ceph's threads call this.
    pub(crate) fn push(&self, result: CallResult) {
        let id = result.id;
        // The completion is added before the check for an orphan. If the call becomes an orphan
        // only after the check, the owner of the queue finds the completion and ends the orphan.
        self.queue.push(result);
        self.ended(id);
    }

    /// Turns the librbd call `id`, a write of this range, into an orphan. Returns false if the disk
    /// has too many orphans.
    pub(crate) fn adopt(&self, id: u64, offset: u64, len: u64) -> bool {
        let Some(orphan) = self.disk.adopt(offset, len) else { return false };
        self.orphans.lock().insert(id, orphan);
        true
    }

    /// Ends the orphan of a completed call, if there is one.
    pub(crate) fn ended(&self, id: u64) {
        if !self.disk.is_empty() {
            let orphan = self.orphans.lock().remove(&id);
            drop(orphan);
        }
    }
}

/// Wakes the owner of the queue, because an orphan of the disk has ended.
impl Wake for Completions {
    fn wake(self: Arc<Self>) {
        self.queue.signal();
    }
}
