//! Completion queue of one disk queue, filled by Ceph's threads.

use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};

/// Completed call.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) id: u64,
    /// Return value; negative for an error number.
    pub(crate) value: i64,
    /// Buffer of the call.
    pub(crate) buffer: Vec<u8>,
}

pub(crate) struct Completions {
    ended: Mutex<Vec<Ended>>,
    /// True if `ended` has entries, or the owner of the queue has to wake up.
    is_signalled: AtomicBool,
    event: EventFd,
}

impl Completions {
    pub(crate) fn new() -> io::Result<Self> {
        let event = EventFd::new()?;
        Ok(Self { ended: Mutex::default(), is_signalled: AtomicBool::new(false), event })
    }

    pub(crate) fn push(&self, ended: Ended) {
        self.ended.lock().push(ended);
        self.signal();
    }

    /// Makes the descriptor readable.
    pub(crate) fn signal(&self) {
        if !self.is_signalled.swap(true, Ordering::AcqRel) {
            self.event.signal();
        }
    }

    /// Appends the completions to `into`.
    pub(crate) fn take(&self, into: &mut Vec<Ended>) {
        if !self.is_signalled.load(Ordering::Acquire) {
            return;
        }
        // The event is drained before the flag is cleared, otherwise a signal between the two is
        // lost.
        self.event.drain();
        self.is_signalled.swap(false, Ordering::AcqRel);
        into.append(&mut self.ended.lock());
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
